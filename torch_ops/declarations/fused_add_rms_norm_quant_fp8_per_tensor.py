"""fused_add_rms_norm_quant_fp8_per_tensor: fused_add_rms_norm, then quantize_fp8_per_tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.contracts import QuantizationContract
from torch_ops.declarations import _quantization
from torch_ops.declarations._shared import upcast
from torch_ops.declarations.fused_add_rms_norm import fused_add_rms_norm
from torch_ops.declare import op
from torch_ops.inlined import rounded

_OP = "fused_add_rms_norm_quant_fp8_per_tensor"
_normalize = fused_add_rms_norm.reference


@op(contract=QuantizationContract(per="tensor", quantized="rounded"), dtypes=_quantization.DTYPES)
def fused_add_rms_norm_quant_fp8_per_tensor(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Add a residual, normalize the sum and quantize that to float8 by a scale.

    As `quantize_fp8_per_tensor` of the first result of `fused_add_rms_norm`, which is rounded to
    the dtype of x in between: a backend's two ops and this one give the same bits.

    Args:
        x: ``[..., hidden]`` float32, float16 or bfloat16, any strides.
        residual: Shape, dtype and device of ``x``.
        weight: ``[hidden]`` of a floating dtype.
        scale: ``[1]`` or ``[]`` float32, a normal number greater than 0.
        eps: Added to the mean of squares, >= 0.

    Returns:
        ``(q, scale, residual_out)``: q and scale those of `quantize_fp8_per_tensor`,
        ``[..., hidden]`` float8 and ``[1]`` float32, a copy of the one that was given;
        residual_out the sum, rounded once to the dtype of x. Codes of a row with NaN or an
        infinity are undefined.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, ``eps`` is negative, or ``scale`` has another shape
            or device.
        NoBackwardError: an input requires grad.
    """
    normed, residual_out = _normalize(x, residual, weight, eps)
    wide, dtype = upcast(rounded(normed)), _quantization.fp8_of(x)
    return (*_quantization.quantize_by(wide, scale, dtype), residual_out)


@fused_add_rms_norm_quant_fp8_per_tensor.check
def _check(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float = 1e-6) -> None:
    _quantization.check_norm(_OP, x, weight, eps, residual)
    _quantization.check_scale(_OP, scale, x)


@fused_add_rms_norm_quant_fp8_per_tensor.debug_check
def _debug_check(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float = 1e-6
) -> None:
    _quantization.check_scale_value(_OP, scale)


@fused_add_rms_norm_quant_fp8_per_tensor.fake
def _fake(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=_quantization.fp8_of(x))
    return codes, x.new_empty(1, dtype=torch.float32), x.new_empty(x.shape)
