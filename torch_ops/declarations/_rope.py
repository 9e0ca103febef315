"""What both rotary embeddings share: the rotation and the checks."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import checks
from torch_ops.declarations._shared import upcast

__all__ = ["check", "check_positions", "opposite", "rotate"]

_INDICES = (torch.int32, torch.int64)


def rotate(x: Tensor, angles: Tensor, is_neox: bool) -> Tensor:
    """Rotate the first ``rotary_dim`` elements of each head; the rest is copied bit for bit.

    Args:
        x: ``[T, heads, D]``.
        angles: ``[T, rotary_dim]`` float32, cosines then sines.
        is_neox: Pair i with i + rotary_dim / 2, else 2i with 2i + 1.
    """
    rotary_dim = angles.shape[-1]
    half = rotary_dim // 2
    x = x.contiguous()
    wide = upcast(x[..., :rotary_dim])
    angles = upcast(angles, wide).unsqueeze(1)
    cos, sin = angles[..., :half], angles[..., half:]
    if is_neox:
        first, second = wide[..., :half], wide[..., half:]
    else:
        first, second = wide[..., 0::2], wide[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.cat(turned, -1) if is_neox else torch.stack(turned, -1).flatten(-2)
    return torch.cat((joined.to(x.dtype), x[..., rotary_dim:]), -1)


def opposite(cos_sin_cache: Tensor, positions: Tensor) -> Tensor:
    """Give cosines and negated sines of each token: ``[T, rotary_dim]``, contiguous.

    The cache has a row for each position of a model's context; those of a batch are few.
    """
    angles = cos_sin_cache.index_select(0, positions)
    angles[:, angles.shape[1] // 2 :].neg_()
    return angles


def check(op: str, q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> None:
    """Refuse tensors that don't fit together."""
    checks.float_dtype(op, "q", q)
    heads, others, cache, device = q.shape, k.shape, cos_sin_cache.shape, q.device
    if len(heads) != 3:
        checks.rank(op, "q", q, 3, "[T, H, D]")
    if len(others) != 3 or others[0] != heads[0] or others[2] != heads[2]:
        accepted = f"[{heads[0]}, K, {heads[2]}], T and D of 'q'"
        checks.refuse(op, "k", f"of shape {list(others)}", accepted)
    if k.dtype != q.dtype or k.device != device:
        checks.like(op, "k", k, q, "q")
    if cos_sin_cache.dtype != torch.float32:
        checks.refuse(op, "cos_sin_cache", cos_sin_cache.dtype, "torch.float32", kind=TypeError)
    if len(cache) != 2:
        checks.rank(op, "cos_sin_cache", cos_sin_cache, 2, "[max_position, rotary_dim]")
    if cache[1] % 2 or cache[1] > heads[2]:
        accepted = f"an even rotary_dim of at most {heads[2]}, the head_dim of 'q'"
        checks.refuse(op, "cos_sin_cache", f"of shape {list(cache)}", accepted)
    if positions.dtype not in _INDICES:
        checks.refuse(op, "positions", positions.dtype, "torch.int32, torch.int64", kind=TypeError)
    if positions.shape != heads[:1]:
        checks.shape(op, "positions", positions, heads[:1], "[T] of 'q'")
    if cos_sin_cache.device != device or positions.device != device:
        for name, tensor in (("cos_sin_cache", cos_sin_cache), ("positions", positions)):
            if tensor.device != device:
                checks.refuse(op, name, f"on device {tensor.device}", f"{device}, as 'q'")


def check_positions(op: str, cos_sin_cache: Tensor, positions: Tensor) -> None:
    """Refuse positions outside of the cache; reads the data."""
    if positions.numel() == 0:
        return
    low, high = int(positions.min()), int(positions.max())
    if low < 0 or high >= cos_sin_cache.shape[0]:
        checks.refuse(
            op,
            "positions",
            f"in the range {low} to {high}",
            f"0 to {cos_sin_cache.shape[0] - 1}, the rows of 'cos_sin_cache'",
        )
