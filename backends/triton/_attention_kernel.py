"""Attention of a tile of queries to all keys that they see, in one pass with an online softmax."""

from __future__ import annotations

import triton.language as tl

from ._launch import device_function, kernel

__all__ = ["attend", "limits", "masked", "scaled", "store", "weigh"]

_LN_2 = tl.constexpr(0.6931471805599453)


@device_function
def _tile(
    source: tl.tensor, local: tl.tensor, row: tl.tensor, start: tl.tensor, end: tl.tensor,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load ``[BLOCK_N, BLOCK_W]`` keys or values from ``start`` on, zeros past the last."""
    mask = (start + tl.arange(0, BLOCK_N))[:, None] < end
    if WIDTH != BLOCK_W:
        mask = mask & (tl.arange(0, BLOCK_W)[None, :] < WIDTH)
    return tl.load(source + start * row + local, mask=mask, other=0.0)


@device_function
def _local(
    row: tl.tensor, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, WIDE: tl.constexpr
) -> tl.tensor:
    """Give the offsets of a tile's elements from its first one."""
    if WIDE:
        rows = tl.arange(0, BLOCK_N).to(tl.int64) * row
    else:
        rows = tl.arange(0, BLOCK_N) * row.to(tl.int32)
    return rows[:, None] + tl.arange(0, BLOCK_W)[None, :]


@device_function
def limits(
    first: tl.tensor, last: tl.tensor, keys: tl.tensor, window: tl.tensor,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Give where the keys start and end that a tile sees, and which of them need no mask.

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


@device_function
def _capped(logits: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """Give ``cap * tanh(logits * ln(2) / 2)``; 1 - t is exact where tanh is small."""
    t = tl.exp2(-tl.abs(logits))
    size = cap * ((1.0 - t) / (1.0 + t))
    return tl.where(logits < 0.0, -size, size)


@device_function
def scaled(logits: tl.tensor, scale: tl.tensor, cap: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """Give logits, capped where wanted, and what takes them to powers of 2."""
    if CAP:
        return _capped(logits * scale, cap), 1.0
    return logits, scale


@device_function
def masked(
    logits: tl.tensor, start: tl.tensor, place: tl.tensor, keys: tl.tensor, window: tl.tensor,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Put -inf where a query doesn't see a key."""
    key = start + tl.arange(0, BLOCK_N)
    seen = key[None, :] < keys
    if CAUSAL:
        seen = seen & (key[None, :] <= place[:, None])
    if WINDOW:
        seen = seen & (key[None, :] >= place[:, None] - window)
    return tl.where(seen, logits, float("-inf"))


@device_function
def weigh(
    logits: tl.tensor, scale: tl.tensor, top: tl.tensor, total: tl.tensor, SHIFT: tl.constexpr
) -> tl.tensor:
    """Give weights, what earlier ones shrink by, and the new maximum and sum of each row."""
    new_top = tl.maximum(top, tl.max(logits, 1) * scale)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits * scale - (base - SHIFT)[:, None])
    shrink = tl.exp2(top - base)
    return weights, shrink, new_top, total * shrink + tl.sum(weights, 1)


@device_function
def store(
    sums: tl.tensor, top: tl.tensor, total: tl.tensor, out: tl.tensor, lse: tl.tensor,
    at: tl.tensor, inside: tl.tensor,
    LSE: tl.constexpr, SHIFT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_V: tl.constexpr,
) -> None:  # fmt: skip
    """Store rows of the output and of the LSE; empty ones are zeros and -inf."""
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    sums = sums * (1.0 / total)[:, None]
    columns = tl.arange(0, BLOCK_V)
    mask = inside[:, None]
    if WIDTH != BLOCK_V:
        mask = mask & (columns[None, :] < WIDTH)
    tl.store(out + at[:, None] * WIDTH + columns[None, :], sums.to(out.dtype.element_ty), mask=mask)
    if LSE:
        # Undone before the logarithm: a sum of 14 and a small one would lose what the LSE may err.
        value = tl.where(empty, float("-inf"), (top + tl.log2(total * 2.0**-SHIFT)) * _LN_2)
        tl.store(lse + at, value, mask=inside)


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
    LANE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """Attend BLOCK_M rows: queries of one head, or of the PACK heads that share a key head.

    Programs with the longest rows come first, so that short ones fill up the end.

    Args:
        q, k, v: ``[B, S, H, D]`` with any strides but 1 along D.
        out, lse: Contiguous outputs.
        scale: Multiplier that takes logits to powers of 2, or with a cap to twice their tanh's.
        cap: The cap in powers of 2.
        window: Keys before its own that a query attends to.
        queries, keys: Lengths.
        slots: Heads of all sequences; key heads where query heads are packed.
        slots_of_batch: Those of one sequence.
        group: Slots that read one key head.
        q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head: Strides in lanes.
        SHIFT: Power of 2 that weights are multiplied by: keeps small ones normal in float16.
        PACK: Query heads of a slot.
        WIDTH, WIDTH_V: Elements of a head.
        LANE: Elements of a lane; tells the compiler that strides are multiples of it.
        WIDE: Offsets within a tile don't fit into 32 bits.
    """
    program = tl.program_id(0)
    slot = program % slots
    block = tl.num_programs(0) // slots - 1 - program // slots
    batch, head = slot // slots_of_batch, slot % slots_of_batch
    kv_head = head // group
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    query, member = row // PACK, head * PACK + row % PACK
    inside = query < queries
    columns = tl.arange(0, BLOCK_D)
    mask = inside[:, None]
    if WIDTH != BLOCK_D:
        mask = mask & (columns[None, :] < WIDTH)
    q_at = batch * (q_batch * LANE) + query * (q_row * LANE) + member * (q_head * LANE)
    rows = tl.load(q + q_at[:, None] + columns[None, :], mask=mask, other=0.0)
    k += batch * (k_batch * LANE) + kv_head * (k_head * LANE)
    v += batch * (v_batch * LANE) + kv_head * (v_head * LANE)
    k_local = _local(k_row * LANE, BLOCK_N, BLOCK_D, WIDE)
    v_local = _local(v_row * LANE, BLOCK_N, BLOCK_V, WIDE)
    shift = keys - queries
    place = query + shift
    first = block * BLOCK_M // PACK + shift
    last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // PACK, queries - 1) + shift
    low, high, left, right = limits(first, last, keys, window, CAUSAL, WINDOW, BLOCK_N)
    sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        tile = _tile(k, k_local, k_row * LANE, start, keys, WIDTH, BLOCK_D, BLOCK_N)
        logits = tl.dot(rows, tile.T, input_precision="ieee")
        logits, factor = scaled(logits, scale, cap, CAP)
        if (start >= right) | (start < left):
            logits = masked(logits, start, place, keys, window, CAUSAL, WINDOW, BLOCK_N)
        weights, shrink, top, total = weigh(logits, factor, top, total, SHIFT)
        tile = _tile(v, v_local, v_row * LANE, start, keys, WIDTH_V, BLOCK_V, BLOCK_N)
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(tile.dtype), tile, sums, input_precision="ieee")
    at = (batch.to(tl.int64) * queries + query) * (slots_of_batch * PACK) + member
    store(sums, top, total, out, lse, at, inside, LSE, SHIFT, WIDTH_V, BLOCK_V)
