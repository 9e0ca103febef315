"""AITER's reshape_and_cache_flash, which skips negative slots."""

import functools

import torch
from torch import Tensor

from torch_ops import limits
from torch_ops.once import once

from . import _library, _rows

__all__ = ["append_paged_kv_", "supports"]


def supports(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> str | None:
    if k.dtype not in _rows.DTYPES:
        return limits.unsupported("k", k, _rows.DTYPES)
    if k.shape != v.shape:
        return f"v of shape {list(v.shape)} (supported: {list(k.shape)}, that of k)"
    if not (k.numel() and k_cache.numel()):
        return None
    for name, x in (("k", k), ("v", v)):
        if not x[0].is_contiguous():
            return limits.strides(name, x, "tokens of contiguous heads")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not cache[0].is_contiguous():
            return limits.strides(name, cache, "contiguous pages")
    if k_cache.shape[0] > 1 and k_cache.stride(0) != v_cache.stride(0):
        return limits.strides("v_cache", v_cache, f"pages {k_cache.stride(0)} apart, as k_cache")
    if not slot_mapping.is_contiguous():
        return limits.strides("slot_mapping", slot_mapping, "contiguous")
    return None


def append_paged_kv_(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    if k.numel() and k_cache.numel():
        args = (k, v, k_cache, v_cache, slot_mapping, "auto")
        _library.run("reshape_and_cache_flash", k, *args, *[_unused(k.device)] * 2)


@functools.cache
def _unused(device: torch.device) -> Tensor:
    """Give a scale; of a cache in the dtype of the keys none is read."""
    return once(
        ("aiter", "scale", device),
        "a scale for AITER's reshape_and_cache_flash",
        lambda: torch.ones(1, device=device),
    )
