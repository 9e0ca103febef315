"""Attention of sequences of different lengths in Triton: tile sizes and the launch."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._attention import arch_of, config, in_powers_of_2, positive, shift_of
from ._launch import WARP, Variant
from ._pages import (
    LONGEST_WINDOW,
    id_count,
    lane_of_steps,
    regular,
    regular_pages,
    steps_of,
)
from ._ragged_kernel import attend_ragged
from ._rows import power_of_two

__all__ = ["Bounds", "forward"]

_BYTES = 16
_SEQUENCES = 512  # looked through at once for the owner of a tile


class Bounds(NamedTuple):
    """Where sequences start.

    Attributes:
        qo_indptr, kv_indptr: ``[B + 1]`` of queries, and of keys or pages.
        kv_indices, kv_last_page_len: The page table, None where keys are packed.
        longest: At least the queries of the longest sequence, if that is known.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor | None = None
    kv_last_page_len: Tensor | None = None
    longest: int | None = None


class _Call(NamedTuple):
    """All that a plan depends on: not how many queries, keys and pages there are."""

    shapes: tuple[Sequence[int], ...]
    strides: tuple[Sequence[int], ...]
    dtype: torch.dtype
    device: int
    is_causal: bool
    scale: float
    window_left: int
    logits_soft_cap: float
    with_lse: bool
    rows: int
    aligned: bool


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Bounds,
    is_causal: bool,
    scale: float | None,
    window_left: int,
    logits_soft_cap: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attend to ``k`` and ``v``, packed ``[N, K, D]`` or pages; gives output and LSE if wanted."""
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if with_lse else None
    batch, indices = bounds.qo_indptr.shape[0] - 1, bounds.kv_indices
    listed = k.shape[0] if indices is None else indices.shape[0]
    if not out.numel() or not k.numel() or not listed or not batch:
        return out.zero_(), None if lse is None else lse.fill_(-math.inf)
    q, scale = positive(q, scale)
    q = regular(q)
    if indices is None:
        k, v = regular(k), regular(v)
    else:
        k, v, indices = regular_pages(k, v, indices)
    group = q.shape[1] // k.shape[-2]
    most = -(-q.shape[0] // batch) if bounds.longest is None else bounds.longest
    rows = next((tile for tile in (16, 32, 64) if most * group <= tile), 65)
    call = _Call(
        (q.shape[1:], k.shape[1:], v.shape[1:]), (q.stride(), k.stride(), v.stride()), q.dtype,
        q.get_device(), is_causal, scale, window_left, logits_soft_cap, with_lse, rows,
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) % _BYTES == 0,
    )  # fmt: skip
    plan = _plan(call)
    slots = batch + 1 + q.shape[0] * group // plan.block_m
    given = (bounds.qo_indptr, bounds.kv_indptr, indices, bounds.kv_last_page_len)
    table = [None if t is None else t.contiguous() for t in given]
    plan.variant(
        slots * k.shape[-2], (q, k, v, *table, out, lse),
        (*plan.scaling, batch, q.shape[1], q.shape[0], listed, k.shape[0], *plan.steps),
    )  # fmt: skip
    return out, lse


class _Plan(NamedTuple):
    variant: Variant
    block_m: int
    scaling: tuple[float, float, int]
    steps: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _plan(call: _Call) -> _Plan:
    """Choose the kernel and its numbers."""
    heads, head_dim = call.shapes[0]
    *pages, kv_heads, value_dim = call.shapes[2]
    page = pages[0] if pages else 0
    shapes = [(2, *shape) for shape in call.shapes]  # any number of queries, keys and pages
    steps = steps_of(shapes, call.strides)
    lane = lane_of_steps(steps, call.dtype.itemsize, call.aligned)
    if not page:
        for each in steps[1:]:
            each.insert(0, 0)
    capped = call.logits_soft_cap > 0
    window = min(call.window_left, LONGEST_WINDOW)
    variant, block_m = _variant(
        call.dtype, (call.is_causal, call.window_left >= 0, capped, call.with_lse),
        (heads // kv_heads, head_dim, value_dim, lane, page), call.rows, call.device,
    )  # fmt: skip
    return _Plan(
        variant,
        block_m,
        (*in_powers_of_2(call.scale, call.logits_soft_cap), window),
        tuple(step // lane for each in steps for step in each),
    )


@functools.cache
def _variant(
    dtype: torch.dtype, flags: tuple[bool, ...], sizes: tuple[int, ...], rows: int, device: int
) -> tuple[Variant, int]:
    """Give the kernel for a dtype, flags from CAUSAL to LSE, sizes from GROUP to PAGE, and rows."""
    block_d, block_v = (max(16, power_of_two(width)) for width in sizes[1:3])
    lane, page = sizes[3:]
    chosen = config(arch_of(device), dtype.itemsize, max(block_d, block_v), rows, lane)
    ids = id_count(chosen.block_n, page)
    stages = chosen.stages if ids or not page else 2 * chosen.stages - 1
    constants = (
        *flags, shift_of(dtype), *sizes, ids, _SEQUENCES,
        chosen.block_m, chosen.block_n, block_d, block_v, stages,
    )  # fmt: skip
    options = {"enable_fp_fusion": True, "num_stages": stages}
    threads = chosen.warps * WARP
    made = attend_ragged.variant(constants, threads, device, aligned=lane > 1, options=options)
    return made, chosen.block_m
