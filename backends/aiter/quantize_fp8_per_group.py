"""AITER's per_group_quant_hip."""

from torch import Tensor

from torch_ops import limits
from torch_ops.declarations._quantization import empty, fp8_of

from . import _library, _rows

__all__ = ["quantize_fp8_per_group", "supports"]

_SIZES = (32, 64, 128)


def supports(x: Tensor, group_size: int = 128) -> str | None:
    if x.dtype not in limits.HALVES:
        return limits.unsupported("x", x, limits.HALVES)
    if group_size not in _SIZES:
        return f"group_size {group_size} (supported: {', '.join(map(str, _SIZES))})"
    return _rows.unfit(("x",), (x,))


def quantize_fp8_per_group(x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
    dtype, groups = fp8_of(x), x.shape[-1] // group_size
    if not x.numel():
        return empty(x, dtype, groups)
    q, scale = _library.run("per_group_quant_hip", x, limits.rows(x), None, dtype, group_size)
    return q.view(x.shape), scale.view(*x.shape[:-1], groups)
