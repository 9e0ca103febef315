"""Attention of long queries on Hopper, in Gluon: who loads, who multiplies and when is explicit.

One warp loads keys and values ahead with the tensor memory accelerator. Two groups of four warps
take 64 queries each. A group has its last weighted values in the tensor cores while it computes
the next weights, and nothing but loads ties the groups to each other, so that one's softmax runs
under the other's products.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ._hopper import barriers, device_function, load, store

__all__ = ["ROWS", "attend_long"]

ROWS = 128
_HALF = gl.constexpr(ROWS // 2)
_LN_2 = gl.constexpr(0.6931471805599453)


@device_function
def _capped(logits: gl.tensor, cap: gl.tensor) -> gl.tensor:
    """Give ``cap * tanh(logits * ln(2) / 2)``; 1 - t is exact where tanh is small."""
    t = gl.exp2(-gl.abs(logits))
    size = cap * ((1.0 - t) / (1.0 + t))
    return gl.where(logits < 0.0, -size, size)


@device_function
def _weigh(
    logits: gl.tensor, top: gl.tensor, total: gl.tensor, start: gl.tensor, place: gl.tensor,
    limits: gl.tuple, numbers: gl.tuple,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, SHIFT: gl.constexpr,
    BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Give weights, what earlier ones shrink by, and the new maximum and sum of each row."""
    left, right = limits
    scale, cap, window, keys = numbers
    if CAP:
        logits = _capped(logits * scale, cap)
        scale = 1.0
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


@device_function
def _limits(
    first: gl.tensor, keys: gl.tensor, window: gl.tensor,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """Give (left, right): a block of keys from n on needs no mask if left <= n < right."""
    right = keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        right = gl.minimum(right, gl.maximum(first + 1, 0) // BLOCK_N * BLOCK_N)
    left = first * 0
    if WINDOW:
        left = gl.maximum(first + _HALF - 1 - window, 0)
    return left, right


@device_function
def _product(
    q: gl.tensor, k_at: gl.tensor, stage: gl.tensor, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr
) -> gl.tensor:
    """Start the product of queries and the keys of a stage."""
    zeros = gl.zeros([_HALF, BLOCK_N], gl.float32, LAYOUT)
    keys = k_at.index(stage).permute((1, 0))
    return warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)


@device_function
def _finish(
    sums: gl.tensor, top: gl.tensor, total: gl.tensor, q: gl.tensor, out: gl.tensor,
    lse: gl.tensor, place: gl.tuple, lengths: gl.tuple, rows: gl.tensor,
    LSE: gl.constexpr, SHIFT: gl.constexpr, LAYOUT: gl.constexpr,
) -> None:  # fmt: skip
    """Store rows of the LSE and, when their last product is done, of the output."""
    batch, head, start = place
    queries, heads = lengths
    empty = total == 0.0
    total = gl.where(empty, 1.0, total)
    if LSE:
        value = gl.where(empty, float("-inf"), (top + gl.log2(total * 2.0**-SHIFT)) * _LN_2)
        at = (batch.to(gl.int64) * queries + start + rows) * heads + head
        gl.store(lse + at, value, mask=start + rows < queries)
    sums = warpgroup_mma_wait(0, [sums])
    sums = sums * gl.convert_layout(1.0 / total, LAYOUT)[:, None]
    q.store(sums.to(q.dtype))
    fence_async_shared()
    store(out, [batch, head, start, 0], q)
    tma.store_wait(0)


@device_function
def _multiply(
    memory: gl.tuple, full: gl.tuple, free: gl.tuple, out: gl.tensor, lse: gl.tensor,
    numbers: gl.tuple, lengths: gl.tuple, tile: gl.tuple,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
    LSE: gl.constexpr, SHIFT: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Attend the first or the second 64 queries of a tile.

    The next keys are waited for before the product with values is, which keeps the compiler from
    moving that wait before the softmax.
    """
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OF_LOGITS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    q_at, k_at, v_at = memory
    q_full, k_full, v_full = full
    k_free, v_free = free
    batch, head, start, high, count = tile
    start += HALF * _HALF
    first = start + numbers[3] - lengths[0]
    rows = gl.arange(0, _HALF, OF_LOGITS)
    limits = _limits(first, numbers[3], numbers[2], CAUSAL, WINDOW, BLOCK_N)
    key = (high - 1) * BLOCK_N
    q = q_at.index(HALF)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    logits = warpgroup_mma_wait(0, [_product(q, k_at, 0, BLOCK_N, LOGITS)])
    mbarrier.arrive(k_free.index(0))
    top = gl.full([_HALF], float("-inf"), gl.float32, OF_LOGITS)
    total = gl.zeros([_HALF], gl.float32, OF_LOGITS)
    weights, shrink, top, total = _weigh(
        logits, top, total, key, first + rows, limits, numbers,
        CAUSAL, WINDOW, CAP, SHIFT, BLOCK_N, LOGITS,
    )  # fmt: skip
    mbarrier.wait(k_full.index(1 % STAGES), (1 // STAGES) & 1, pred=count > 1)
    sums = gl.zeros([_HALF, BLOCK_D], gl.float32, SUMS)
    for step in range(1, count):
        key -= BLOCK_N
        logits = _product(q, k_at, step % STAGES, BLOCK_N, LOGITS)
        sums = sums * gl.convert_layout(shrink, OF_SUMS)[:, None]
        operand = gl.convert_layout(weights.to(v_at.dtype), OPERAND)
        last = step - 1
        mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
        sums = warpgroup_mma(operand, v_at.index(last % STAGES), sums, is_async=True)
        logits = warpgroup_mma_wait(1, [logits])
        mbarrier.arrive(k_free.index(step % STAGES))
        weights, shrink, top, total = _weigh(
            logits, top, total, key, first + rows, limits, numbers,
            CAUSAL, WINDOW, CAP, SHIFT, BLOCK_N, LOGITS,
        )  # fmt: skip
        next = step + 1
        mbarrier.wait(k_full.index(next % STAGES), (next // STAGES) & 1, pred=next < count)
        sums = warpgroup_mma_wait(0, [sums])
        mbarrier.arrive(v_free.index(last % STAGES))
    sums = sums * gl.convert_layout(shrink, OF_SUMS)[:, None]
    operand = gl.convert_layout(weights.to(v_at.dtype), OPERAND)
    last = count - 1
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    sums = warpgroup_mma(operand, v_at.index(last % STAGES), sums, is_async=True)
    _finish(sums, top, total, q, out, lse, (batch, head, start), lengths, rows, LSE, SHIFT, OF_SUMS)


@device_function
def _load_ahead(
    q: gl.tensor, k: gl.tensor, v: gl.tensor, memory: gl.tuple, full: gl.tuple, free: gl.tuple,
    group: gl.tensor, tile: gl.tuple, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Load the queries, and keys and values from the last ones on."""
    q_at, k_at, v_at = memory
    q_full, k_full, v_full = full
    k_free, v_free = free
    batch, head, start, high, count = tile
    mbarrier.expect(q_full, 2 * q.block_type.nbytes)
    load(q, [batch, head, start, 0], q_full, q_at.index(0))
    load(q, [batch, head, start + _HALF, 0], q_full, q_at.index(1))
    for step in range(count):
        key = (high - 1 - step) * BLOCK_N
        stage = step % STAGES
        phase = ((step // STAGES) & 1) ^ 1
        mbarrier.wait(k_free.index(stage), phase)
        mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
        load(k, [batch, head // group, key, 0], k_full.index(stage), k_at.index(stage))
        mbarrier.wait(v_free.index(stage), phase)
        mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
        load(v, [batch, head // group, key, 0], v_full.index(stage), v_at.index(stage))


def _attend_long(
    q: gl.tensor, k: gl.tensor, v: gl.tensor, out: gl.tensor, lse: gl.tensor,
    scale: gl.float32, cap: gl.float32, window: gl.int32, queries: gl.int32, keys: gl.int32,
    slots: gl.int32, heads: gl.int32, group: gl.int32,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, LSE: gl.constexpr,
    SHIFT: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Attend 128 queries of one head.

    Programs with the most keys come first. Each takes a block of keys at least, which may be
    masked as a whole.

    Args:
        q, k, v, out: Descriptors of ``[batch, head, row, column]``.
        lse: Contiguous ``[batch, queries, heads]`` float32, or None.
        scale: Multiplier that takes logits to powers of 2, or with a cap to twice their tanh's.
        cap: The cap in powers of 2.
        window: Keys before its own that a query attends to.
        queries, keys: Lengths.
        slots: Heads of all sequences.
        heads: Heads of one.
        group: Query heads of a key head.
        SHIFT: Power of 2 that weights are multiplied by: keeps small ones normal in float16.
    """
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    memory = (
        gl.allocate_shared_memory(q.dtype, [2, _HALF, BLOCK_D], SWIZZLED),
        gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_N, BLOCK_D], SWIZZLED),
        gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_N, BLOCK_D], SWIZZLED),
    )
    full = (barriers(1, 1).index(0), barriers(STAGES, 1), barriers(STAGES, 1))
    free = (barriers(STAGES, 2), barriers(STAGES, 2))
    fence_async_shared()
    program = gl.program_id(0)
    slot = program % slots
    start = (gl.num_programs(0) // slots - 1 - program // slots) * (2 * _HALF)
    first = start + keys - queries
    high = gl.cdiv(keys, BLOCK_N)
    if CAUSAL:
        end = gl.maximum(gl.minimum(keys, first + 2 * _HALF), 0)
        high = gl.maximum(gl.cdiv(end, BLOCK_N), 1)
    count = high
    if WINDOW:
        count = high - gl.minimum(gl.maximum(first - window, 0) // BLOCK_N, high - 1)
    tile = (slot // heads, slot % heads, start, high, count)
    numbers = (scale, cap, window, keys)
    lengths = (queries, heads)
    gl.warp_specialize(
        [
            (_multiply, (
                memory, full, free, out, lse, numbers, lengths, tile,
                0, CAUSAL, WINDOW, CAP, LSE, SHIFT, BLOCK_N, BLOCK_D, STAGES,
            )),
            (_multiply, (
                memory, full, free, out, lse, numbers, lengths, tile,
                1, CAUSAL, WINDOW, CAP, LSE, SHIFT, BLOCK_N, BLOCK_D, STAGES,
            )),
            (_load_ahead, (
                q, k, v, memory, full, free, group, tile, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


attend_long: Any = gluon.jit(
    do_not_specialize=["scale", "cap", "window", "queries", "keys", "slots", "heads", "group"]
)(_attend_long)
