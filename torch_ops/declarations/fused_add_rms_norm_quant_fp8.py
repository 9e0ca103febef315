"""fused_add_rms_norm_quant_fp8: fused_add_rms_norm, then quantize_fp8_per_token of its norm."""

from __future__ import annotations

from torch import Tensor

from torch_ops.contracts import QuantizationContract
from torch_ops.declarations import _quantization
from torch_ops.declarations._shared import upcast
from torch_ops.declarations.fused_add_rms_norm import fused_add_rms_norm
from torch_ops.declare import op
from torch_ops.inlined import rounded

_OP = "fused_add_rms_norm_quant_fp8"
_normalize = fused_add_rms_norm.reference


@op(contract=QuantizationContract(quantized="rounded"), dtypes=_quantization.DTYPES)
def fused_add_rms_norm_quant_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Add a residual, normalize the sum by its root mean square and quantize it to float8 by rows.

    As `quantize_fp8_per_token` of the first result of `fused_add_rms_norm`, which is rounded to
    the dtype of x in between: a backend's two ops and this one give the same bits.

    Args:
        x: ``[..., hidden]`` float32, float16 or bfloat16, any strides.
        residual: Shape, dtype and device of ``x``.
        weight: ``[hidden]`` of a floating dtype.
        eps: Added to the mean of squares, >= 0.

    Returns:
        ``(q, scale, residual_out)``: q and scale those of `quantize_fp8_per_token`,
        ``[..., hidden]`` float8 and ``[..., 1]`` float32; residual_out the sum, rounded once to
        the dtype of x. A row with NaN or an infinity is undefined.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, or ``eps`` is negative.
        NoBackwardError: an input requires grad.
    """
    normed, residual_out = _normalize(x, residual, weight, eps)
    q, scale = _quantization.quantize_rows(upcast(rounded(normed)), _quantization.fp8_of(x))
    return q, scale, residual_out


fused_add_rms_norm_quant_fp8.batch("x", "residual")


@fused_add_rms_norm_quant_fp8.check
def _check(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    _quantization.check_norm(_OP, x, weight, eps, residual)


@fused_add_rms_norm_quant_fp8.fake
def _fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    return (*_quantization.empty(x, _quantization.fp8_of(x), 1), x.new_empty(x.shape))
