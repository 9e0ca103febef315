"""What writes into the slots of a paged cache shares: the checks."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import checks
from torch_ops.declarations import _paged

__all__ = ["check", "check_memory", "check_slots"]


def check(
    op: str, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Refuse tensors that don't fit together, and caches whose elements share memory."""
    checks.float_dtype(op, "k", k)
    checks.rank(op, "k", k, 3, "[T, K, D]")
    tokens, heads, head_dim = k.shape
    if v.dim() != 3 or v.shape[:2] != k.shape[:2]:
        checks.refuse(op, "v", f"of shape {list(v.shape)}", f"[{tokens}, {heads}, Dv], as 'k'")
    _paged.check_pages(op, k_cache, v_cache, head_dim, "D of 'k'")
    for name, cache, rows, of in (("k_cache", k_cache, k, "k"), ("v_cache", v_cache, v, "v")):
        if cache.shape[2:] != rows.shape[1:]:
            wanted = f"{[*cache.shape[:2], *rows.shape[1:]]}, the heads of {of!r}"
            checks.refuse(op, name, f"of shape {list(cache.shape)}", wanted)
    for name, tensor in (("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        checks.like(op, name, tensor, k, "k")
    if slot_mapping.dtype != torch.int64:
        checks.refuse(op, "slot_mapping", slot_mapping.dtype, "torch.int64", kind=TypeError)
    checks.shape(op, "slot_mapping", slot_mapping, k.shape[:1], "[T] of 'k'")
    if slot_mapping.device != k.device:
        received = f"on device {slot_mapping.device}"
        checks.refuse(op, "slot_mapping", received, f"{k.device}, as 'k'")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        checks.no_self_overlap(op, name, cache)


def check_memory(
    op: str, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Refuse caches that share memory with each other, or with what is read."""
    checks.no_overlap(op, "k_cache", k_cache, "v_cache", v_cache)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        for other, read in (("k", k), ("v", v), ("slot_mapping", slot_mapping)):
            checks.no_overlap(op, name, cache, other, read)


def check_slots(op: str, k_cache: Tensor, slot_mapping: Tensor) -> None:
    """Refuse slots behind the cache's last one; reads the data."""
    slots = k_cache.shape[0] * k_cache.shape[1]
    high = int(slot_mapping.max()) if slot_mapping.numel() else -1
    if high >= slots:
        accepted = f"at most {slots - 1}, the last slot of 'k_cache'; a negative one is skipped"
        checks.refuse(op, "slot_mapping", f"as high as {high}", accepted)
