"""fused_add_rms_norm_quant_fp8_per_group: fused_add_rms_norm, then quantize_fp8_per_group."""

from __future__ import annotations

from torch import Tensor

from torch_ops.contracts import QuantizationContract
from torch_ops.declarations import _quantization
from torch_ops.declarations._shared import upcast
from torch_ops.declarations.fused_add_rms_norm import fused_add_rms_norm
from torch_ops.declare import op
from torch_ops.inlined import rounded

_OP = "fused_add_rms_norm_quant_fp8_per_group"
_normalize = fused_add_rms_norm.reference


@op(contract=QuantizationContract(per="group", quantized="rounded"), dtypes=_quantization.DTYPES)
def fused_add_rms_norm_quant_fp8_per_group(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, group_size: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    """Add a residual, normalize the sum and quantize that to float8 in groups.

    As `quantize_fp8_per_group` of the first result of `fused_add_rms_norm`, which is rounded to
    the dtype of x in between: a backend's two ops and this one give the same bits.

    Args:
        x: ``[..., hidden]`` float32, float16 or bfloat16, any strides.
        residual: Shape, dtype and device of ``x``.
        weight: ``[hidden]`` of a floating dtype.
        eps: Added to the mean of squares, >= 0.
        group_size: Elements of a group, a divisor of hidden.

    Returns:
        ``(q, scale, residual_out)``: q and scale those of `quantize_fp8_per_group`,
        ``[..., hidden]`` float8 and ``[..., hidden / group_size]`` float32; residual_out the sum,
        rounded once to the dtype of x. A row with NaN or an infinity is undefined.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, ``eps`` is negative, or ``group_size`` doesn't
            divide hidden.
        NoBackwardError: an input requires grad.
    """
    normed, residual_out = _normalize(x, residual, weight, eps)
    wide, dtype = upcast(rounded(normed)), _quantization.fp8_of(x)
    return (*_quantization.quantize_groups(wide, group_size, dtype), residual_out)


fused_add_rms_norm_quant_fp8_per_group.batch("x", "residual")


@fused_add_rms_norm_quant_fp8_per_group.check
def _check(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, group_size: int = 128
) -> None:
    _quantization.check_norm(_OP, x, weight, eps, residual)
    of = f"the last dimension of 'x' {list(x.shape)}"
    _quantization.check_group(_OP, group_size, x.shape[-1], of)


@fused_add_rms_norm_quant_fp8_per_group.fake
def _fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, group_size: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        *_quantization.empty(x, _quantization.fp8_of(x), x.shape[-1] // group_size),
        x.new_empty(x.shape),
    )
