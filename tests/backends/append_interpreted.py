"""Run Triton's append to a paged cache in its interpreter; one JSON object: check -> what broke."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from . import workers

# tokens, key heads, head_dim, that of values, pages, slots of a page
SIZES = {
    "whole lanes": (37, 3, 80, 24, 9, 5),
    "a page of one": (7, 1, 64, 64, 9, 1),
    "odd heads": (9, 2, 7, 3, 5, 4),
    "no tokens": (0, 2, 8, 8, 3, 4),
    "all slots": (64, 2, 128, 128, 4, 16),
}
LAYOUTS = ("apart", "interleaved", "heads first", "every other")
DTYPES = ("float16", "float32", "float64")
# tokens, heads, key heads, head_dim, rotary_dim, that of values, pages, slots of a page
TURNED = {
    "llama": (3, 8, 2, 128, 128, 128, 4, 16),
    "packed": (5, 4, 1, 64, 64, 64, 2, 8),
    "a tail": (5, 3, 3, 80, 32, 24, 9, 1),
    "odd columns": (9, 2, 5, 10, 6, 3, 4, 4),
    "no angles": (4, 2, 1, 16, 0, 16, 4, 4),
    "no queries": (4, 0, 2, 16, 16, 16, 4, 4),
    "no pages": (4, 2, 2, 16, 8, 8, 0, 4),
}
TILES = ("of the interpreter", "of a GPU")


def checks() -> list[str]:
    """Name everything that is checked."""
    return [
        f"{dtype}: {size}: {LAYOUTS[(i + j) % len(LAYOUTS)]}"
        for i, dtype in enumerate(DTYPES)
        for j, size in enumerate(SIZES)
    ] + [f"{dtype}: {size}: {tiles}" for dtype in DTYPES for size in TURNED for tiles in TILES]


def run(check: str) -> None:
    """Append, some slots negative; everything else stays, bit for bit."""
    import torch_ops

    dtype, size, layout = check.split(": ")
    if layout in TILES:
        for is_neox in (True, False):
            _turn(getattr(torch, dtype), size, is_neox, layout)
        return
    tokens, heads, width, value_width, pages, page = SIZES[size]
    torch.manual_seed(2)
    kind = getattr(torch, dtype)
    caches = [_cache(layout, pages, page, heads, w).to(kind) for w in (width, value_width)]
    if layout == "interleaved" and width == value_width:
        caches = list(torch.randn(pages, 2, page, heads, width).to(kind).unbind(1))
    k, v = (torch.randn(heads, tokens, w).to(kind).transpose(0, 1) for w in (width, value_width))
    slots = torch.randperm(pages * page)[:tokens]
    slots[1::4] = -3
    expected = [cache.clone() for cache in caches]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            for cache, rows in zip(expected, (k, v), strict=True):
                cache[slot // page, slot % page] = rows[token]
    torch_ops.ops.append_paged_kv_(k, v, *caches, slots, backend="triton")
    for got, want in zip(caches, expected, strict=True):
        assert torch.equal(got, want)


def _turn(kind: torch.dtype, size: str, is_neox: bool, tiles: str) -> None:
    """Rotate and append at once, bit for bit as two kernels do."""
    import torch_ops

    tokens, heads, kv_heads, width, rotary, value_width, pages, page = TURNED[size]
    torch.manual_seed(3)
    sizes = (heads, width), (kv_heads, width), (kv_heads, value_width)
    q, k, v = (torch.randn(tokens, n, w).to(kind) for n, w in sizes)
    if size == "packed":
        q, k, v = torch.cat([q, k, v], 1).split([heads, kv_heads, kv_heads], 1)
    layout = "every other" if size == "odd columns" else "heads first"
    caches = [_cache(layout, pages, page, kv_heads, w).to(kind) for w in (width, value_width)]
    slots = torch.randperm(max(pages * page, tokens))[:tokens] - (0 if pages else tokens)
    slots[1::4] = -3
    angles, positions = torch.randn(20, rotary), torch.arange(tokens, dtype=torch.int32) * 2
    rotary_module: Any = importlib.import_module("torch_ops.backends.triton._rotary")
    fused_module: Any = importlib.import_module("torch_ops.backends.triton._rotary_append")
    interpreted, rotary_module.INTERPRETED = rotary_module.INTERPRETED, tiles == TILES[0]
    for kept in (fused_module._plans, fused_module._launches):
        kept.clear()
    try:
        turned, keys = torch_ops.ops.apply_rope(q, k, angles, positions, is_neox, backend="triton")
        expected = [cache.clone() for cache in caches]
        torch_ops.ops.append_paged_kv_(keys, v, *expected, slots, backend="triton")
        given = k.clone()
        torch_ops.ops.apply_rope_append_paged_kv_(
            q, k, v, angles, positions, *caches, slots, is_neox, backend="triton"
        )
    finally:
        rotary_module.INTERPRETED = interpreted
    for got, want in zip((q, k, *caches), (turned, given, *expected), strict=True):
        assert torch.equal(got, want)


def _cache(layout: str, pages: int, page: int, heads: int, width: int) -> Tensor:
    if layout == "heads first":
        return torch.randn(pages, heads, page, width).transpose(1, 2)
    if layout == "every other":
        return torch.randn(pages, page, heads, 2 * width)[..., ::2]
    return torch.randn(pages, page, heads, width)


if __name__ == "__main__":
    workers.work(checks(), run)
