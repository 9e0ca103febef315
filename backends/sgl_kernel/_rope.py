"""sgl-kernel's rotary embedding, in place, and what it can't take.

Cosines and sines are read and multiplied in the dtype of q, so that only float32 is left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _library

__all__ = ["refusal", "rotate"]


def refusal(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> str | None:
    """Give why these can't be rotated, or None."""
    if q.dtype is not torch.float32:
        return (
            f"q dtype {q.dtype} (supported: torch.float32; the cosines and sines would be of that "
            "dtype, the op's contract: float32)"
        )
    if positions.dtype is not torch.int64:
        return f"positions dtype {positions.dtype} (supported: torch.int64)"
    if q.numel() == 0 or k.numel() == 0:
        return None if q.shape[0] == 0 or q.shape[2] == 0 else "no heads (supported: at least one)"
    if not cache.shape[1]:
        return "rotary_dim 0 (supported: at least 2)"
    if q.shape[1] % k.shape[1]:
        return f"{k.shape[1]} heads of k (supported: divisors of the {q.shape[1]} heads of q)"
    if not (cache.is_contiguous() and positions.is_contiguous()):
        return (
            f"cos_sin_cache strides {cache.stride()}, positions strides {positions.stride()} "
            "(supported: contiguous)"
        )
    return None


def rotate(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor, is_neox: bool) -> None:
    """Rotate in place."""
    if q.numel():
        _library.operator("rotary_embedding")(positions, q, k, q.shape[2], cache, is_neox)
