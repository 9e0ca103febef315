"""sgl-kernel's products of quantized matrices and what they can't take.

They are CUTLASS's: a scale for each row and each column, applied in float32 before the one
rounding. Sums of float8 are those of tensor cores, promoted or not as the tile wants.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import limits

from . import _library

__all__ = ["multiply", "supports"]


def supports(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> str | None:
    """Give why these can't be multiplied, or None."""
    if out_dtype not in limits.HALVES:
        return f"out_dtype {out_dtype} (supported: {', '.join(map(str, limits.HALVES))})"
    if bias is not None and (bias.dtype != out_dtype or not bias.is_contiguous()):
        return f"bias {bias.dtype} of strides {bias.stride()} (supported: {out_dtype}, contiguous)"
    reason = limits.product(a, b, scale_a, scale_b, multiples=(16, 8))
    if reason is not None or not a.shape[0] or not b.shape[1]:
        return reason
    return None if a.dtype == torch.int8 else limits.without_float8(a.dtype, a.get_device())


def multiply(
    operator: str,
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, Tensor],
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    """Run one of them. It launches on the current device, whichever the tensors are on."""
    if not a.shape[0] or not b.shape[1]:
        return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    run, index = _library.operator(operator), a.get_device()
    out: Tensor
    if index < 0 or index == torch.cuda.current_device():
        out = run(a, b, *scales, out_dtype, bias)
    else:
        with torch.cuda.device(index):
            out = run(a, b, *scales, out_dtype, bias)
    return out
