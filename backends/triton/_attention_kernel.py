"""Attention of a tile of queries to all keys that they see, in one pass with an online softmax."""

from __future__ import annotations

import triton.language as tl

from ._launch import device_function, kernel

__all__ = ["attend"]

_LN_2 = tl.constexpr(0.6931471805599453)


@device_function
def _capped(logits: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """Give ``cap * tanh(logits * ln(2) / 2)``; 1 - t is exact where tanh is small."""
    t = tl.exp2(-tl.abs(logits))
    size = cap * ((1.0 - t) / (1.0 + t))
    return tl.where(logits < 0.0, -size, size)


@device_function
def _tile(
    source: tl.tensor, local: tl.tensor, row: tl.tensor, start: tl.tensor, end: tl.tensor, batch: tl.tensor, head: tl.tensor,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, DESCRIBED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load ``[BLOCK_N, BLOCK_W]`` keys or values from ``start`` on, zeros past the last."""
    if DESCRIBED:
        tile = source.load([batch, head, start, 0]).reshape(BLOCK_N, BLOCK_W)
    else:
        mask = (start + tl.arange(0, BLOCK_N))[:, None] < end
        if WIDTH != BLOCK_W:
            mask = mask & (tl.arange(0, BLOCK_W)[None, :] < WIDTH)
        tile = tl.load(source + start * row + local, mask=mask, other=0.0)
    return tile


@device_function
def _local(
    row: tl.tensor, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, WIDE: tl.constexpr,
    DESCRIBED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Give the offsets of a tile's elements from its first one."""
    if DESCRIBED:
        return 0
    if WIDE:
        rows = tl.arange(0, BLOCK_N).to(tl.int64) * row
    else:
        rows = tl.arange(0, BLOCK_N) * row.to(tl.int32)
    return rows[:, None] + tl.arange(0, BLOCK_W)[None, :]


@device_function
def _limits(
    first: tl.tensor, last: tl.tensor, keys: tl.tensor, window: tl.tensor,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Give where keys of a tile start and end, and the part of them that needs no mask.

    Args:
        first, last: Keys at which the first and the last query stand.
        keys, window: As in `attend`.

    Returns:
        ``(low, high, left, right)``: a block of keys from n on needs none if left <= n < right.
    """
    low, high = 0, keys
    left, right = 0, keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        high = tl.maximum(tl.minimum(keys, last + 1), 0)
        right = tl.minimum(right, tl.maximum(first + 1, 0) // BLOCK_N * BLOCK_N)
    if WINDOW:
        low = tl.maximum(first - window, 0) // BLOCK_N * BLOCK_N
        left = tl.maximum(last - window, 0)
    return low, high, left, right


@kernel()
def attend(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, out: tl.tensor, lse: tl.tensor,
    scale: tl.float32, cap: tl.float32, window: tl.int32,
    queries: tl.int32, keys: tl.int32, slots: tl.int32, slots_of_batch: tl.int32, group: tl.int32,
    q_batch: tl.int64, q_row: tl.int64, q_head: tl.int64,
    k_batch: tl.int64, k_row: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_row: tl.int64, v_head: tl.int64,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, LSE: tl.constexpr,
    SHIFT: tl.constexpr, PACK: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    LANE: tl.constexpr, WIDE: tl.constexpr, DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """Attend BLOCK_M rows: queries of one head, or of the PACK heads that share a key head.

    Programs with the longest rows come first, so that short ones fill up the end.

    Args:
        q, k, v: Pointers, or for k and v descriptors of ``[batch, head, row, column]``.
        out, lse: Contiguous outputs.
        scale: Multiplier that takes logits to powers of 2, or with a cap to twice their tanh's.
        cap: The cap in powers of 2.
        window: Keys before its own that a query attends to.
        queries, keys: Lengths.
        slots: Heads of all sequences; of key heads where heads are packed.
        slots_of_batch: Of one sequence.
        group: Query heads of a key head, 1 where heads are packed.
        q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head: Strides in lanes.
        SHIFT: Power of 2 that weights are multiplied by: keeps small ones normal in float16.
        PACK: Query heads in a tile.
        WIDTH, WIDTH_V: Elements of a head.
        LANE: Elements of a lane; tells the compiler that strides are multiples of it.
        WIDE: Offsets within a tile don't fit into 32 bits.
    """
    program = tl.program_id(0)
    slot = program % slots
    block = tl.num_programs(0) // slots - 1 - program // slots
    batch, head = slot // slots_of_batch, slot % slots_of_batch
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row // PACK
    columns, columns_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    q_at = query.to(tl.int64) * (q_row * LANE) + (row % PACK).to(tl.int64) * (q_head * LANE)
    q += batch.to(tl.int64) * (q_batch * LANE) + (head * PACK).to(tl.int64) * (q_head * LANE)
    inside = query < queries
    mask = inside[:, None]
    if WIDTH != BLOCK_D:
        mask = mask & (columns[None, :] < WIDTH)
    tile = tl.load(q + q_at[:, None] + columns[None, :], mask=mask, other=0.0)
    kv_head = head // group
    if not DESCRIBED:
        k += (batch.to(tl.int64) * k_batch + kv_head.to(tl.int64) * k_head) * LANE
        v += (batch.to(tl.int64) * v_batch + kv_head.to(tl.int64) * v_head) * LANE
    k_local = _local(k_row * LANE, BLOCK_N, BLOCK_D, WIDE, DESCRIBED)
    v_local = _local(v_row * LANE, BLOCK_N, BLOCK_V, WIDE, DESCRIBED)
    place = query + (keys - queries)
    first = block * BLOCK_M // PACK + (keys - queries)
    last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // PACK, queries - 1) + (keys - queries)
    low, high, left, right = _limits(first, last, keys, window, CAUSAL, WINDOW, BLOCK_N)
    weighted = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        keys_tile = _tile(
            k, k_local, k_row * LANE, start, keys, batch, kv_head,
            WIDTH, BLOCK_D, BLOCK_N, DESCRIBED,
        )  # fmt: skip
        logits = tl.dot(tile, keys_tile.T, input_precision="ieee")
        factor = scale
        if CAP:
            logits = _capped(logits * scale, cap)
            factor = 1.0
        if (start >= right) | (start < left):
            key = start + tl.arange(0, BLOCK_N)
            seen = key[None, :] < keys
            if CAUSAL:
                seen = seen & (key[None, :] <= place[:, None])
            if WINDOW:
                seen = seen & (key[None, :] >= place[:, None] - window)
            logits = tl.where(seen, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1) * factor)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logits * factor - (base - SHIFT)[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None]
        values = _tile(
            v, v_local, v_row * LANE, start, keys, batch, kv_head,
            WIDTH_V, BLOCK_V, BLOCK_N, DESCRIBED,
        )  # fmt: skip
        weighted = tl.dot(weights.to(values.dtype), values, weighted, input_precision="ieee")
        top = new_top
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    weighted = weighted * (1.0 / total)[:, None]
    at = (batch.to(tl.int64) * queries + query) * (slots_of_batch * PACK) + head * PACK + row % PACK
    mask = inside[:, None]
    if WIDTH_V != BLOCK_V:
        mask = mask & (columns_v[None, :] < WIDTH_V)
    out_at = at[:, None] * WIDTH_V + columns_v[None, :]
    tl.store(out + out_at, weighted.to(out.dtype.element_ty), mask=mask)
    if LSE:
        value = tl.where(empty, float("-inf"), (top - SHIFT + tl.log2(total)) * _LN_2)
        tl.store(lse + at, value, mask=inside)
