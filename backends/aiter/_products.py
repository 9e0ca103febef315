"""AITER's products of quantized matrices and what they can't take.

They are Composable Kernel's: a scale for each row and each column, applied in float32 before the
one rounding. K isn't split, which would add parts in the dtype of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import limits
from torch_ops.declarations._quantization import fp8_of

from . import _library

__all__ = ["multiply", "supports"]

_DEPTH = 256  # what the widest tile reads of K at once


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
    if a.dtype not in (torch.int8, fp8_of(a)):
        return f"a dtype {a.dtype} (supported: {fp8_of(a)}, that of the device)"
    if bias is not None:
        return f"a bias {bias.dtype} (supported: None)"
    return limits.product(a, b, scale_a, scale_b, multiples=(_DEPTH, 16))


def multiply(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Run it."""
    if not a.shape[0] or not b.shape[1]:
        return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    args = (a, b.t(), scale_a, scale_b, None, out_dtype, 0)
    out: Tensor = _library.run("gemm_a8w8", a, *args)
    return out
