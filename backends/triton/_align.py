"""Sorts assignments of tokens by expert: each expert's program looks for its own among all.

No two programs write one place and nothing is added atomically, so that the order is that of the
assignments. All of them are read once per expert and launch, from a cache; where they are few,
each program counts them for all experts and one launch is enough.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from torch_ops.declarations._experts import capacity

from ._launch import INTERPRETED, Variant, device_function, kernel
from ._rows import power_of_two

__all__ = ["MOST_EXPERTS", "align"]

MOST_EXPERTS = 8191
_CHUNK = 2048  # assignments that a program looks at at once
_FEW = 4096  # assignments that every program counts for all experts


@device_function
def _look(
    ids: tl.tensor, first: tl.tensor, count: tl.tensor, row: tl.tensor, column: tl.tensor,
    K: tl.constexpr, CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load a chunk of ids by their strides; -1 behind the last."""
    at = first + tl.arange(0, CHUNK)
    offset = (at // K).to(tl.int64) * row + (at % K) * column
    return tl.load(ids + offset, mask=at < count, other=-1)


@kernel(unaligned=("ids", "counts"))
def _count(
    ids: tl.tensor, counts: tl.tensor,
    count: tl.int32, row: tl.int64, column: tl.int64,
    K: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Count one expert's assignments."""
    expert = tl.program_id(0)
    mine = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, count, CHUNK):
        found = _look(ids, first, count, row, column, K, CHUNK)
        mine += (found == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(mine, 0))


@kernel(unaligned=("ids", "counts", "sorted_ids", "expert_ids", "total"))
def _place(
    ids: tl.tensor, counts: tl.tensor, sorted_ids: tl.tensor, expert_ids: tl.tensor,
    total: tl.tensor, count: tl.int32, row: tl.int64, column: tl.int64, room: tl.int32,
    experts: tl.int32,
    K: tl.constexpr, B: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
) -> None:  # fmt: skip
    """Place one expert's assignments, its padding, and a part of what lies behind the last."""
    expert = tl.program_id(0)
    every = tl.arange(0, BLOCK_E)
    if COUNTED:
        counts_of = tl.load(counts + every, mask=every < experts, other=0)
    else:
        counts_of = tl.zeros((BLOCK_E,), tl.int32)
        for first in range(0, count, CHUNK):
            found = _look(ids, first, count, row, column, K, CHUNK)
            inside = (found >= 0) & (found < experts)
            counts_of += tl.histogram(tl.where(inside, found, BLOCK_E - 1), BLOCK_E)
        counts_of = tl.where(every < experts, counts_of, 0)
    padded = (counts_of + (B - 1)) // B * B
    start = tl.sum(tl.where(every < expert, padded, 0), 0)
    end = start + tl.sum(tl.where(every == expert, padded, 0), 0)
    last = tl.sum(padded, 0)
    if expert == 0:
        tl.store(total, last)
    lane = tl.arange(0, CHUNK)
    place = start
    for first in range(0, count, CHUNK):
        found = _look(ids, first, count, row, column, K, CHUNK)
        is_mine = found == expert
        rank = tl.cumsum(is_mine.to(tl.int32), 0)
        tl.store(sorted_ids + place + rank - 1, first + lane, mask=is_mine)
        place += tl.sum(is_mine.to(tl.int32), 0)
    for first in range(place, end, CHUNK):
        tl.store(sorted_ids + first + lane, count, mask=first + lane < end)
    for first in range(start // B, end // B, CHUNK):
        tl.store(expert_ids + first + lane, expert, mask=first + lane < end // B)
    for first in range(last + expert * CHUNK, room, experts * CHUNK):
        tl.store(sorted_ids + first + lane, count, mask=first + lane < room)
    for first in range(last // B + expert * CHUNK, room // B, experts * CHUNK):
        tl.store(expert_ids + first + lane, -1, mask=first + lane < room // B)


class _Plan(NamedTuple):
    counting: Variant
    placing: Variant
    counted: bool


def align(ids: Tensor, num_experts: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Give the sorted assignments, the expert of each block, and how many entries are used."""
    number, device = ids.numel(), ids.get_device()
    room = capacity(number, num_experts, block_size)
    sorted_ids, total = ids.new_empty(room), ids.new_empty(1)
    expert_ids = ids.new_empty(room // block_size)
    if not number:
        return sorted_ids, expert_ids, total.zero_()
    chunk = min(power_of_two(number), _CHUNK)
    plan = _plan(ids.shape[1], num_experts, block_size, chunk, number > _FEW, device)
    counts = total
    numbers = (number, *ids.stride())
    if plan.counted:
        counts = ids.new_empty(num_experts)
        plan.counting(num_experts, (ids, counts), numbers)
    plan.placing(
        num_experts, (ids, counts, sorted_ids, expert_ids, total),
        (*numbers, room, num_experts),
    )  # fmt: skip
    return sorted_ids, expert_ids, total


@functools.lru_cache(maxsize=4096)
def _plan(
    k: int, num_experts: int, block_size: int, chunk: int, counted: bool, device: int
) -> _Plan:
    threads = 32 if INTERPRETED else min(max(chunk // 8, 32), 256)
    count = _count.variant((k, chunk), threads, device, aligned=False)
    block_e = power_of_two(num_experts + 1)  # one more, for what is left out
    constants = (k, block_size, block_e, chunk, counted)
    return _Plan(count, _place.variant(constants, threads, device, aligned=False), counted)
