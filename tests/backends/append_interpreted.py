"""Run Triton's append to a paged cache in its interpreter; one JSON object: check -> what broke."""

from __future__ import annotations

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


def checks() -> list[str]:
    """Name everything that is checked."""
    return [
        f"{dtype}: {size}: {LAYOUTS[(i + j) % len(LAYOUTS)]}"
        for i, dtype in enumerate(DTYPES)
        for j, size in enumerate(SIZES)
    ]


def run(check: str) -> None:
    """Append, some slots negative; everything else stays, bit for bit."""
    import torch_ops

    dtype, size, layout = check.split(": ")
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


def _cache(layout: str, pages: int, page: int, heads: int, width: int) -> Tensor:
    if layout == "heads first":
        return torch.randn(pages, heads, page, width).transpose(1, 2)
    if layout == "every other":
        return torch.randn(pages, page, heads, 2 * width)[..., ::2]
    return torch.randn(pages, page, heads, width)


if __name__ == "__main__":
    workers.work(checks(), run)
