"""rms_norm_quant_fp8_per_group: rms_norm, then quantize_fp8_per_group."""

from __future__ import annotations

from torch import Tensor

from torch_ops.contracts import QuantizationContract
from torch_ops.declarations import _quantization
from torch_ops.declarations._shared import upcast
from torch_ops.declarations.rms_norm import rms_norm
from torch_ops.declare import op
from torch_ops.inlined import rounded

_OP = "rms_norm_quant_fp8_per_group"
_normalize = rms_norm.reference


@op(contract=QuantizationContract(per="group", quantized="rounded"), dtypes=_quantization.DTYPES)
def rms_norm_quant_fp8_per_group(
    x: Tensor, weight: Tensor, eps: float = 1e-6, group_size: int = 128
) -> tuple[Tensor, Tensor]:
    """Normalize the last axis by its root mean square and quantize it to float8 in groups.

    As `quantize_fp8_per_group` of `rms_norm`, which is rounded to the dtype of x in between: a
    backend's two ops and this one give the same bits.

    Args:
        x: ``[..., hidden]`` float32, float16 or bfloat16, any strides.
        weight: ``[hidden]`` of a floating dtype.
        eps: Added to the mean of squares, >= 0.
        group_size: Elements of a group, a divisor of hidden.

    Returns:
        ``(q, scale)``, those of `quantize_fp8_per_group`: ``[..., hidden]`` float8 and
        ``[..., hidden / group_size]`` float32. A row with NaN or an infinity is undefined.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, ``eps`` is negative, or ``group_size`` doesn't
            divide hidden.
        NoBackwardError: an input requires grad.
    """
    normed = _normalize(x, weight, eps)
    wide, dtype = upcast(rounded(normed)), _quantization.fp8_of(x)
    return _quantization.quantize_groups(wide, group_size, dtype)


rms_norm_quant_fp8_per_group.batch("x")


@rms_norm_quant_fp8_per_group.check
def _check(x: Tensor, weight: Tensor, eps: float = 1e-6, group_size: int = 128) -> None:
    _quantization.check_norm(_OP, x, weight, eps)
    of = f"the last dimension of 'x' {list(x.shape)}"
    _quantization.check_group(_OP, group_size, x.shape[-1], of)


@rms_norm_quant_fp8_per_group.fake
def _fake(
    x: Tensor, weight: Tensor, eps: float = 1e-6, group_size: int = 128
) -> tuple[Tensor, Tensor]:
    return _quantization.empty(x, _quantization.fp8_of(x), x.shape[-1] // group_size)
