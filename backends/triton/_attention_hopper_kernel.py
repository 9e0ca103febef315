"""Attention of long queries on Hopper, in Gluon: who loads, who multiplies and when is explicit.

One warp loads keys and values ahead with the tensor memory accelerator. Two groups of four warps
take 64 queries each. A group has its next logits and its last weighted values in the tensor cores
while it computes weights, and nothing but loads ties the groups to each other, so that one's
softmax runs under the other's products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["ROWS", "attend_long"]

_F = TypeVar("_F", bound=Callable[..., Any])

ROWS = 128
_HALF = gl.constexpr(ROWS // 2)
_LN_2 = gl.constexpr(0.6931471805599453)
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


def _device_function(function: _F) -> _F:
    made: _F = gluon.jit(function)
    return made


@_device_function
def _place(
    tile: gl.tensor, slots: gl.tensor, heads: gl.tensor, queries: gl.tensor, keys: gl.tensor,
    window: gl.tensor, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Give what a tile is: ``(batch, head, first query, first block of keys, blocks)``.

    Tiles with the most keys come first. Each has a block at least, which may be masked as a whole.
    """
    blocks = gl.cdiv(queries, 2 * _HALF)
    start = (blocks - 1 - tile // slots) * (2 * _HALF)
    slot = tile % slots
    shift = keys - queries
    high = gl.cdiv(keys, BLOCK_N)
    if CAUSAL:
        end = gl.minimum(keys, start + 2 * _HALF + shift)
        high = gl.maximum(gl.cdiv(gl.maximum(end, 0), BLOCK_N), 1)
    low = start * 0
    if WINDOW:
        low = gl.minimum(gl.maximum(start + shift - window, 0) // BLOCK_N, high - 1)
    return slot // heads, slot % heads, start, low, high - low


@_device_function
def _softmax(
    logits: gl.tensor, top: gl.tensor, total: gl.tensor, start: gl.tensor, place: gl.tensor,
    right: gl.tensor, left: gl.tensor, keys: gl.tensor, scale: gl.tensor, window: gl.tensor,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SHIFT: gl.constexpr, BLOCK_N: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Give weights, what earlier ones shrink by, and the new maximum and sum of each row."""
    if (start >= right) | (start < left):
        key = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        seen = key[None, :] < keys
        if CAUSAL:
            seen = seen & (key[None, :] <= place[:, None])
        if WINDOW:
            seen = seen & (key[None, :] >= place[:, None] - window)
        logits = gl.where(seen, logits, float("-inf"))
    new_top = gl.maximum(top, gl.max(logits, 1) * scale)
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(logits * scale - (base - SHIFT)[:, None])
    shrink = gl.exp2(top - base)
    return weights, shrink, new_top, total * shrink + gl.sum(weights, 1)


@_device_function
def _multiply(
    q_at: gl.tensor, k_at: gl.tensor, v_at: gl.tensor, q_full: gl.tensor, q_free: gl.tensor,
    k_full: gl.tensor, k_free: gl.tensor, v_full: gl.tensor, v_free: gl.tensor, turn: gl.tensor,
    out: gl.tensor, lse: gl.tensor, scale: gl.tensor, window: gl.tensor, queries: gl.tensor,
    keys: gl.tensor, slots: gl.tensor, heads: gl.tensor, tiles: gl.tensor,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, LSE: gl.constexpr,
    SHIFT: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    TURNS: gl.constexpr,
) -> None:  # fmt: skip
    """Attend the first or the second 64 queries of each tile.

    Waiting for the next keys before the values' product is waited for keeps the compiler from
    moving that wait before the softmax.
    """
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OF_LOGITS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    q = q_at.index(HALF)
    zeros = gl.zeros([_HALF, BLOCK_N], gl.float32, LOGITS)
    rows = gl.arange(0, _HALF, OF_LOGITS)
    shift = keys - queries
    done = 0
    turns = 0
    served = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, head, start, low, count = _place(
            tile, slots, heads, queries, keys, window, CAUSAL, WINDOW, BLOCK_N
        )
        start += HALF * _HALF
        place = start + shift + rows
        right = keys // BLOCK_N * BLOCK_N
        if CAUSAL:
            right = gl.minimum(right, gl.maximum(start + shift + 1, 0) // BLOCK_N * BLOCK_N)
        left = start * 0
        if WINDOW:
            left = gl.maximum(start + _HALF - 1 + shift - window, 0)
        key = (low + count - 1) * BLOCK_N
        mbarrier.wait(q_full, served & 1)
        mbarrier.wait(k_full.index(done % STAGES), (done // STAGES) & 1)
        k = k_at.index(done % STAGES).permute((1, 0))
        logits = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
        logits = warpgroup_mma_wait(0, [logits])
        mbarrier.arrive(k_free.index(done % STAGES))
        top = gl.full([_HALF], float("-inf"), gl.float32, OF_LOGITS)
        total = gl.zeros([_HALF], gl.float32, OF_LOGITS)
        weights, shrink, top, total = _softmax(
            logits, top, total, key, place, right, left, keys, scale, window,
            CAUSAL, WINDOW, SHIFT, BLOCK_N, LOGITS,
        )  # fmt: skip
        step = done + 1
        last = done + count
        mbarrier.wait(k_full.index(step % STAGES), (step // STAGES) & 1, pred=step < last)
        sums = gl.zeros([_HALF, BLOCK_D], gl.float32, SUMS)
        for step in range(done + 1, last):
            key -= BLOCK_N
            if TURNS:
                mbarrier.wait(turn.index(HALF), (turns + 1 + HALF) & 1)
                turns += 1
            k = k_at.index(step % STAGES).permute((1, 0))
            logits = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
            sums = sums * gl.convert_layout(shrink, OF_SUMS)[:, None]
            operand = gl.convert_layout(weights.to(v_at.dtype), OPERAND)
            before = step - 1
            mbarrier.wait(v_full.index(before % STAGES), (before // STAGES) & 1)
            sums = warpgroup_mma(operand, v_at.index(before % STAGES), sums, is_async=True)
            if TURNS:
                mbarrier.arrive(turn.index(1 - HALF))
            logits = warpgroup_mma_wait(1, [logits])
            mbarrier.arrive(k_free.index(step % STAGES))
            weights, shrink, top, total = _softmax(
                logits, top, total, key, place, right, left, keys, scale, window,
                CAUSAL, WINDOW, SHIFT, BLOCK_N, LOGITS,
            )  # fmt: skip
            after = step + 1
            mbarrier.wait(k_full.index(after % STAGES), (after // STAGES) & 1, pred=after < last)
            sums = warpgroup_mma_wait(0, [sums])
            mbarrier.arrive(v_free.index(before % STAGES))
        done = last
        served += 1
        before = last - 1
        sums = sums * gl.convert_layout(shrink, OF_SUMS)[:, None]
        operand = gl.convert_layout(weights.to(v_at.dtype), OPERAND)
        mbarrier.wait(v_full.index(before % STAGES), (before // STAGES) & 1)
        sums = warpgroup_mma(operand, v_at.index(before % STAGES), sums, is_async=True)
        empty = total == 0.0
        total = gl.where(empty, 1.0, total)
        if LSE:
            value = gl.where(empty, float("-inf"), (top - SHIFT + gl.log2(total)) * _LN_2)
            at = (batch.to(gl.int64) * queries + start + rows) * heads + head
            gl.store(lse + at, value, mask=start + rows < queries)
        sums = warpgroup_mma_wait(0, [sums])
        mbarrier.arrive(v_free.index(before % STAGES))
        sums = sums * gl.convert_layout(1.0 / total, OF_SUMS)[:, None]
        q.store(sums.to(q.dtype))
        fence_async_shared()
        _store(out, [batch, head, start, 0], q)
        tma.store_wait(0)
        mbarrier.arrive(q_free)


@_device_function
def _load_ahead(
    q: gl.tensor, k: gl.tensor, v: gl.tensor, q_at: gl.tensor, k_at: gl.tensor, v_at: gl.tensor,
    q_full: gl.tensor, q_free: gl.tensor, k_full: gl.tensor, k_free: gl.tensor,
    v_full: gl.tensor, v_free: gl.tensor, window: gl.tensor, queries: gl.tensor, keys: gl.tensor,
    slots: gl.tensor, heads: gl.tensor, group: gl.tensor, tiles: gl.tensor,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Load queries, keys and values of all tiles, the last keys first."""
    done = 0
    served = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, head, start, low, count = _place(
            tile, slots, heads, queries, keys, window, CAUSAL, WINDOW, BLOCK_N
        )
        kv_head = head // group
        for index in range(count):
            key = (low + count - 1 - index) * BLOCK_N
            stage = (done + index) % STAGES
            free = (((done + index) // STAGES) & 1) ^ 1
            mbarrier.wait(k_free.index(stage), free)
            mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
            _load(k, [batch, kv_head, key, 0], k_full.index(stage), k_at.index(stage))
            if index == 0:
                mbarrier.wait(q_free, (served & 1) ^ 1)
                mbarrier.expect(q_full, 2 * q.block_type.nbytes)
                _load(q, [batch, head, start, 0], q_full, q_at.index(0))
                _load(q, [batch, head, start + _HALF, 0], q_full, q_at.index(1))
            mbarrier.wait(v_free.index(stage), free)
            mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
            _load(v, [batch, kv_head, key, 0], v_full.index(stage), v_at.index(stage))
        done += count
        served += 1


@gluon.jit(
    do_not_specialize=["scale", "window", "queries", "keys", "slots", "heads", "group", "tiles"]
)
def attend_long(
    q: gl.tensor, k: gl.tensor, v: gl.tensor, out: gl.tensor, lse: gl.tensor, scale: gl.float32,
    window: gl.int32, queries: gl.int32, keys: gl.int32, slots: gl.int32, heads: gl.int32,
    group: gl.int32, tiles: gl.int32,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, LSE: gl.constexpr, SHIFT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
) -> None:  # fmt: skip
    """Attend tiles of 128 queries of one head, tile after tile in each program.

    Args:
        q, k, v, out: Descriptors of ``[batch, head, row, column]``.
        lse: Contiguous ``[batch, queries, heads]`` float32, or None.
        scale: Multiplier that takes logits to powers of 2.
        window: Keys before its own that a query attends to.
        queries, keys: Lengths.
        slots: Heads of all sequences.
        heads: Heads of one.
        group: Query heads of a key head.
        tiles: Number of tiles.
        SHIFT: Power of 2 that weights are multiplied by: keeps small ones normal in float16.
        TURNS: Groups of warps take turns at the tensor cores.
    """
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_at = gl.allocate_shared_memory(q.dtype, [2, _HALF, BLOCK_D], SWIZZLED)
    k_at = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_N, BLOCK_D], SWIZZLED)
    v_at = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_N, BLOCK_D], SWIZZLED)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, 1)
    mbarrier.init(q_free, 2)
    mbarrier.init(turn.index(0), 1)
    mbarrier.init(turn.index(1), 1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), 1)
        mbarrier.init(k_free.index(stage), 2)
        mbarrier.init(v_full.index(stage), 1)
        mbarrier.init(v_free.index(stage), 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                q_at, k_at, v_at, q_full, q_free, k_full, k_free, v_full, v_free, turn, out, lse,
                scale, window, queries, keys, slots, heads, tiles,
                0, CAUSAL, WINDOW, LSE, SHIFT, BLOCK_N, BLOCK_D, STAGES, TURNS,
            )),
            (_multiply, (
                q_at, k_at, v_at, q_full, q_free, k_full, k_free, v_full, v_free, turn, out, lse,
                scale, window, queries, keys, slots, heads, tiles,
                1, CAUSAL, WINDOW, LSE, SHIFT, BLOCK_N, BLOCK_D, STAGES, TURNS,
            )),
            (_load_ahead, (
                q, k, v, q_at, k_at, v_at, q_full, q_free, k_full, k_free, v_full, v_free,
                window, queries, keys, slots, heads, group, tiles,
                CAUSAL, WINDOW, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
