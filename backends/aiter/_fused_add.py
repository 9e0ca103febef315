"""AITER's norms of a sum and what they can't take.

They normalize the sum in float32, before it is rounded to be stored. In float32 that is the stored
sum, as the op's contract wants; in float16 and bfloat16 it isn't.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_ops import limits

from . import _library, _rows

__all__ = ["fuse", "refusal"]


def refusal(x: Tensor, residual: Tensor, weight: Tensor) -> str | None:
    """Give why these can't be added and normalized, or None."""
    if x.dtype in limits.HALVES:
        return limits.unrounded_sum(x)
    reason = _rows.weighted(x, weight, (torch.float32,))
    return reason or _rows.unfit(("x", "residual", "weight"), (x, residual, weight))


def fuse(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, **options: Any
) -> tuple[Tensor, Tensor]:
    """Add and normalize into fresh tensors."""
    out, residual_out = x.new_empty(x.shape), x.new_empty(x.shape)
    if x.numel():
        rows = (limits.rows(part) for part in (out, x, residual, residual_out))
        _library.run("rmsnorm2d_fwd_with_add", x, *rows, weight, eps, **options)
    return out, residual_out
