"""silu_and_mul_quant_fp8_per_tensor: silu_and_mul, then quantize_fp8_per_tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.contracts import QuantizationContract
from torch_ops.declarations import _gates, _quantization
from torch_ops.declarations._shared import upcast
from torch_ops.declarations.silu_and_mul import silu_and_mul
from torch_ops.declare import op
from torch_ops.inlined import rounded

_OP = "silu_and_mul_quant_fp8_per_tensor"
_activate = silu_and_mul.reference


@op(contract=QuantizationContract(per="tensor", quantized="rounded"), dtypes=_quantization.DTYPES)
def silu_and_mul_quant_fp8_per_tensor(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply the activated gate by the value and quantize that to float8 by a scale.

    As `quantize_fp8_per_tensor` of `silu_and_mul`, which is rounded to the dtype of x in between:
    a backend's two ops and this one give the same bits.

    Args:
        x: ``[..., 2d]`` float32, float16 or bfloat16, any strides; the gate first.
        scale: ``[1]`` or ``[]`` float32, a normal number greater than 0.

    Returns:
        ``(q, scale)``, those of `quantize_fp8_per_tensor`: ``[..., d]`` float8 and ``[1]``
        float32, a copy of the one that was given. The code of NaN or an infinity is undefined.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: the last dimension is odd, or ``scale`` has another shape or device.
        NoBackwardError: an input requires grad.
    """
    gated = _activate(x)
    wide, dtype = upcast(rounded(gated)), _quantization.fp8_of(x)
    return _quantization.quantize_by(wide, scale, dtype)


@silu_and_mul_quant_fp8_per_tensor.check
def _check(x: Tensor, scale: Tensor) -> None:
    _quantization.check(_OP, x)
    _gates.check(_OP, x)
    _quantization.check_scale(_OP, scale, x)


@silu_and_mul_quant_fp8_per_tensor.debug_check
def _debug_check(x: Tensor, scale: Tensor) -> None:
    _quantization.check_scale_value(_OP, scale)


@silu_and_mul_quant_fp8_per_tensor.fake
def _fake(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    codes = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=_quantization.fp8_of(x))
    return codes, x.new_empty(1, dtype=torch.float32)
