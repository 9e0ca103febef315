"""Attention of sequences of different lengths, whose keys are packed or in pages."""

from __future__ import annotations

import triton.language as tl

from ._attention_kernel import limits, masked, scaled, store, weigh
from ._launch import device_function, kernel
from ._pages import gathered, ids_of_tile, listed_pages, owner, pages_of_keys, rows_of

__all__ = ["attend_ragged"]


@device_function
def _queries(
    sequence: tl.tensor, qo_indptr: tl.tensor, batch: tl.tensor, tokens: tl.tensor
) -> tl.tensor:
    """Give where a sequence's queries start, and how many there are.

    Rows behind the last sequence are one more, whose queries have nothing to attend.
    """
    begin = tl.maximum(tl.load(qo_indptr + sequence), 0)
    end = tl.load(qo_indptr + sequence + 1, mask=sequence < batch, other=2147483647)
    return begin, tl.minimum(end, tokens) - begin


@device_function
def _keys(
    sequence: tl.tensor, kv_indptr: tl.tensor, kv_last_page_len: tl.tensor,
    batch: tl.tensor, listed: tl.tensor, PAGE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Give where a sequence's keys or page ids start, and how many keys it has."""
    known = tl.minimum(sequence, batch - 1)
    if PAGE == 0:
        begin = tl.maximum(tl.load(kv_indptr + known), 0)
        keys = tl.minimum(tl.load(kv_indptr + known + 1), listed) - begin
    else:
        begin, _, keys = listed_pages(known, kv_indptr, kv_last_page_len, listed, PAGE)
    return begin, tl.where(sequence < batch, tl.maximum(keys, 0), 0)


@kernel(unaligned=("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"))
def attend_ragged(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, qo_indptr: tl.tensor, kv_indptr: tl.tensor,
    kv_indices: tl.tensor, kv_last_page_len: tl.tensor, out: tl.tensor, lse: tl.tensor,
    scale: tl.float32, cap: tl.float32, window: tl.int32,
    batch: tl.int32, heads: tl.int32, tokens: tl.int32, listed: tl.int32, total_pages: tl.int32,
    q_row: tl.int64, q_head: tl.int64, q_column: tl.int64,
    k_page: tl.int64, k_row: tl.int64, k_head: tl.int64, k_column: tl.int64,
    v_page: tl.int64, v_row: tl.int64, v_head: tl.int64, v_column: tl.int64,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, LSE: tl.constexpr,
    SHIFT: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    LANE: tl.constexpr, PAGE: tl.constexpr, IDS: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """Attend BLOCK_M rows: queries of one sequence, of the heads that share a key head.

    Args:
        q: ``[T, H, D]``.
        k, v: ``[N, K, D]``, or ``[P, PAGE, K, D]``; any strides, as of q.
        qo_indptr, kv_indptr, kv_indices, kv_last_page_len: The bounds, and the page table.
        out, lse: Contiguous outputs.
        scale: Multiplier that takes logits to powers of 2, or with a cap to twice their tanh's.
        cap: The cap in powers of 2.
        window: Keys before its own that a query attends to.
        batch, heads, tokens: Sequences, query heads, queries.
        listed: Keys, or length of kv_indices.
        total_pages: Pages.
        q_row, ..., v_column: Strides in lanes; those of columns are used where LANE is 1.
        SHIFT: Power of 2 that weights are multiplied by: keeps small ones normal in float16.
        GROUP: Query heads of a key head.
        PAGE: Keys of a page, 0 where keys are packed.
        IDS: How many ids of pages a tile has, where they are loaded one by one; else 0.
    """
    kv_heads = heads // GROUP
    slot = tl.num_programs(0) // kv_heads - 1 - tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    sequence, block = owner(slot, qo_indptr, batch + 1, BLOCK_M, GROUP, BLOCK_B)
    q_begin, queries = _queries(sequence, qo_indptr, batch, tokens)
    if block * BLOCK_M >= queries * GROUP:
        return
    begin, keys = _keys(sequence, kv_indptr, kv_last_page_len, batch, listed, PAGE)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    exists = query < queries
    token = (q_begin + query).to(tl.int64)
    q_at = token * (q_row * LANE) + head.to(tl.int64) * (q_head * LANE)
    rows = gathered(q, q_at, exists, q_column, WIDTH, BLOCK_D, LANE)
    k += kv_head * (k_head * LANE)
    v += kv_head * (v_head * LANE)
    if PAGE == 0:
        k += begin * (k_row * LANE)
        v += begin * (v_row * LANE)
    else:
        kv_indices += begin
    shift = keys - queries
    place = query + shift
    first = block * BLOCK_M // GROUP + shift
    last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, queries - 1) + shift
    low, high, left, right = limits(first, last, keys, window, CAUSAL, WINDOW, BLOCK_N)
    sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    ids = ids_of_tile(kv_indices, low, high, PAGE, IDS)
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        key = start + tl.arange(0, BLOCK_N)
        inside = key < high
        if WINDOW:
            inside = inside & (key >= first - window)
        page = pages_of_keys(ids, kv_indices, key, start, high, total_pages, PAGE, IDS)
        k_rows = rows_of(key, page, k_page, k_row, LANE, PAGE)
        v_rows = rows_of(key, page, v_page, v_row, LANE, PAGE)
        ids = ids_of_tile(kv_indices, start + BLOCK_N, high, PAGE, IDS)
        tile = gathered(k, k_rows, inside, k_column, WIDTH, BLOCK_D, LANE)
        logits = tl.dot(rows, tile.T, input_precision="ieee")
        logits, factor = scaled(logits, scale, cap, CAP)
        if (start >= right) | (start < left):
            logits = masked(logits, start, place, keys, window, CAUSAL, WINDOW, BLOCK_N)
        weights, shrink, top, total = weigh(logits, factor, top, total, SHIFT)
        tile = gathered(v, v_rows, inside, v_column, WIDTH_V, BLOCK_V, LANE)
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(tile.dtype), tile, sums, input_precision="ieee")
    at = token * heads + head
    store(sums, top, total, out, lse, at, exists, LSE, SHIFT, WIDTH_V, BLOCK_V)
