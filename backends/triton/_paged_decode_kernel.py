"""One query a sequence against its pages: pieces of sequences, then their sum."""

from __future__ import annotations

import triton.language as tl

from ._attention_kernel import scaled, weigh
from ._launch import device_function, kernel
from ._pages import gathered, ids_of_tile, listed_pages, owner, pages_of_keys, rows_of

__all__ = ["decode", "find_piece", "piece_size", "store_piece", "store_rows", "unite"]


@device_function
def piece_size(pages: tl.tensor, most: tl.tensor, ALIGN: tl.constexpr) -> tl.tensor:
    """Give the size of a sequence's pieces: equal ones of at most ``most`` pages, and whole tiles.

    Args:
        pages: Pages of the sequence that are read.
        most: A multiple of ALIGN.
    """
    pieces = tl.maximum(tl.cdiv(pages, most), 1)
    return tl.maximum(tl.cdiv(tl.cdiv(pages, pieces), ALIGN), 1) * ALIGN


@device_function
def _largest_piece(
    kv_indptr: tl.tensor, batch: tl.tensor, share: tl.tensor, pieces: tl.tensor,
    WINDOW: tl.constexpr, ALIGN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Give how many pages a piece may have, a multiple of ALIGN."""
    if WINDOW:
        return share
    total = tl.load(kv_indptr + batch)
    return tl.maximum(tl.cdiv(tl.cdiv(total, pieces), ALIGN) * ALIGN, share)


@device_function
def find_piece(
    slot: tl.tensor, kv_indptr: tl.tensor, batch: tl.tensor, share: tl.tensor, pieces: tl.tensor,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, ALIGN: tl.constexpr, BLOCK_B: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Give the sequence of a slot, the piece's number in it, and how many pages it may have."""
    if not SPLIT:
        return slot, slot * 0, share
    most = _largest_piece(kv_indptr, batch, share, pieces, WINDOW, ALIGN)
    if WINDOW:
        return slot // pieces, slot % pieces, most
    sequence, piece = owner(slot, kv_indptr, batch, most, 1, BLOCK_B)
    return sequence, piece, most


@device_function
def _first_seen(length: tl.tensor, window: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    low = length * 0
    if WINDOW:
        low = tl.maximum(length - 1 - window, 0)
    return low


@device_function
def store_rows(
    out: tl.tensor, sums: tl.tensor, total: tl.tensor, row: tl.tensor, exists: tl.tensor,
    WIDTH: tl.constexpr, BLOCK_V: tl.constexpr,
) -> None:  # fmt: skip
    """Store rows of the output, zeros where nothing was attended."""
    sums = sums * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    columns = tl.arange(0, BLOCK_V)[None, :]
    at = row[:, None] * WIDTH + columns
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=exists[:, None] & (columns < WIDTH))


@device_function
def store_piece(
    parts: tl.tensor, sums: tl.tensor, top: tl.tensor, total: tl.tensor,
    row: tl.tensor, rows: tl.tensor, exists: tl.tensor, WIDTH: tl.constexpr, BLOCK_V: tl.constexpr,
) -> None:  # fmt: skip
    """Store what `unite` sums, with the maxima and sums of weights of all ``rows`` behind it."""
    stats = parts + rows.to(tl.int64) * WIDTH
    columns = tl.arange(0, BLOCK_V)[None, :]
    tl.store(parts + row[:, None] * WIDTH + columns, sums, mask=exists[:, None] & (columns < WIDTH))
    tl.store(stats + row, top, mask=exists)
    tl.store(stats + rows + row, total, mask=exists)


@kernel(unaligned=("kv_indptr", "kv_indices", "kv_last_page_len"))
def decode(
    q: tl.tensor, k: tl.tensor, v: tl.tensor,
    kv_indptr: tl.tensor, kv_indices: tl.tensor, kv_last_page_len: tl.tensor,
    out: tl.tensor, parts: tl.tensor,
    scale: tl.float32, cap: tl.float32, window: tl.int32,
    batch: tl.int32, heads: tl.int32, listed: tl.int32, total_pages: tl.int32,
    share: tl.int32, pieces: tl.int32,
    q_row: tl.int64, q_head: tl.int64, q_column: tl.int64,
    k_page: tl.int64, k_row: tl.int64, k_head: tl.int64, k_column: tl.int64,
    v_page: tl.int64, v_row: tl.int64, v_head: tl.int64, v_column: tl.int64,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SPLIT: tl.constexpr, SHIFT: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, LANE: tl.constexpr,
    PAGE: tl.constexpr, ALIGN: tl.constexpr, IDS: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """Attend up to BLOCK_M query heads of one key head to a piece of a sequence.

    Args:
        q: ``[B, H, D]``.
        k, v: ``[P, PAGE, K, D]``; any strides, as of q.
        kv_indptr, kv_indices, kv_last_page_len: The page table.
        out: ``[B, H, Dv]``, contiguous: what a sequence of one piece gives.
        parts: float32: ``[slots, H, Dv]`` sums of the pieces, weighted and not divided; after
            them ``[2, slots, H]``: maxima in powers of 2, and sums of weights.
        scale: Multiplier that takes logits to powers of 2, or with a cap to twice their tanh's.
        cap: The cap in powers of 2.
        window: Keys before its own that a query attends to.
        batch: Sequences.
        heads: Query heads.
        listed, total_pages: Lengths of kv_indices and of k.
        share: The fewest pages that a piece may be cut to; of windows, the most.
        pieces: How many pieces all sequences are cut into, about; of windows, those of each.
        q_row, ..., v_column: Strides in lanes; those of columns are used where LANE is 1.
        SHIFT: Power of 2 that weights are multiplied by: keeps small ones normal in float16.
        ALIGN: Pages of a tile, at least one.
        IDS: How many ids of pages a tile has, where they are loaded one by one; else 0.
    """
    blocks: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    groups = heads // GROUP * blocks
    slot, part = tl.program_id(0) // groups, tl.program_id(0) % groups
    kv_head = part // blocks
    sequence, piece, most = find_piece(
        slot, kv_indptr, batch, share, pieces, WINDOW, SPLIT, ALIGN, BLOCK_B
    )
    begin, pages, length = listed_pages(sequence, kv_indptr, kv_last_page_len, listed, PAGE)
    low = _first_seen(length, window, WINDOW)
    first = low // PAGE
    size = piece_size(pages - first, most, ALIGN) if SPLIT else pages - first
    if (piece > 0) & (piece * size >= pages - first):
        return
    start = (first + piece * size) * PAGE
    end = tl.minimum(start + size * PAGE, length)

    member = part % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = member < GROUP
    head = kv_head * GROUP + member
    q_at = sequence.to(tl.int64) * (q_row * LANE) + head.to(tl.int64) * (q_head * LANE)
    rows = gathered(q, q_at, exists, q_column, WIDTH, BLOCK_D, LANE)
    k += kv_head * (k_head * LANE)
    v += kv_head * (v_head * LANE)
    kv_indices += begin
    sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    ids = ids_of_tile(kv_indices, start, end, PAGE, IDS)
    for at in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        key = at + tl.arange(0, BLOCK_N)
        inside = key < end
        if WINDOW:
            inside = inside & (key >= low)
        page = pages_of_keys(ids, kv_indices, key, at, end, total_pages, PAGE, IDS)
        k_rows = rows_of(key, page, k_page, k_row, LANE, PAGE)
        v_rows = rows_of(key, page, v_page, v_row, LANE, PAGE)
        ids = ids_of_tile(kv_indices, at + BLOCK_N, end, PAGE, IDS)
        tile = gathered(k, k_rows, inside, k_column, WIDTH, BLOCK_D, LANE)
        logits = tl.dot(rows, tile.T, input_precision="ieee")
        logits, factor = scaled(logits, scale, cap, CAP)
        if (at + BLOCK_N > end) | (at < low):
            seen = (key < end) & (key >= low)
            logits = tl.where(seen[None, :], logits, float("-inf"))
        weights, shrink, top, total = weigh(logits, factor, top, total, SHIFT)
        tile = gathered(v, v_rows, inside, v_column, WIDTH_V, BLOCK_V, LANE)
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(tile.dtype), tile, sums, input_precision="ieee")

    row = sequence.to(tl.int64) * heads + head
    if size >= pages - first:
        store_rows(out, sums, total, row, exists, WIDTH_V, BLOCK_V)
    elif SPLIT:
        row = slot.to(tl.int64) * heads + head
        slots = tl.num_programs(0) // groups
        store_piece(parts, sums, top, total, row, slots * heads, exists, WIDTH_V, BLOCK_V)


@kernel(unaligned=("kv_indptr", "kv_last_page_len"))
def unite(
    kv_indptr: tl.tensor, kv_last_page_len: tl.tensor,
    out: tl.tensor, parts: tl.tensor,
    window: tl.int32, batch: tl.int32, heads: tl.int32, listed: tl.int32,
    share: tl.int32, pieces: tl.int32, slots: tl.int32,
    WINDOW: tl.constexpr, WIDTH_V: tl.constexpr, PAGE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_P: tl.constexpr,
) -> None:  # fmt: skip
    """Sum the pieces of one sequence and head, BLOCK_P at a time; arguments are as in `decode`."""
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    most = _largest_piece(kv_indptr, batch, share, pieces, WINDOW, ALIGN)
    _, pages, length = listed_pages(sequence, kv_indptr, kv_last_page_len, listed, PAGE)
    pages -= _first_seen(length, window, WINDOW) // PAGE
    size = piece_size(pages, most, ALIGN)
    count = tl.cdiv(pages, size)
    if count <= 1:
        return
    first = sequence * pieces if WINDOW else sequence + tl.load(kv_indptr + sequence) // most
    stats = parts + slots.to(tl.int64) * heads * WIDTH_V
    columns = tl.arange(0, BLOCK_V)
    sums = tl.zeros([BLOCK_V], tl.float32)
    total = 0.0
    top = float("-inf")
    for piece in range(0, count, BLOCK_P):
        number = piece + tl.arange(0, BLOCK_P)
        inside = number < count
        at = (first + number).to(tl.int64) * heads + head
        tops = tl.load(stats + at, mask=inside, other=float("-inf"))
        totals = tl.load(stats + slots.to(tl.int64) * heads + at, mask=inside, other=0.0)
        mask = inside[:, None] & (columns[None, :] < WIDTH_V)
        values = tl.load(parts + at[:, None] * WIDTH_V + columns[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(tops - base)
        shrink = tl.exp2(top - base)
        sums = sums * shrink + tl.sum(values * weights[:, None], 0)
        total = total * shrink + tl.sum(totals * weights, 0)
        top = new_top
    sums = sums * (1.0 / tl.where(total == 0.0, 1.0, total))
    out_at = (sequence.to(tl.int64) * heads + head) * WIDTH_V + columns
    tl.store(out + out_at, sums.to(out.dtype.element_ty), mask=columns < WIDTH_V)
