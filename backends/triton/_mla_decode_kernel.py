"""One query a sequence against its latents: a tile is keys and values of all heads."""

from __future__ import annotations

import triton.language as tl

from ._attention_kernel import weigh
from ._launch import kernel
from ._paged_decode_kernel import find_piece, piece_size, store_piece, store_rows
from ._pages import gathered, ids_of_tile, listed_pages, pages_of_keys, rows_of

__all__ = ["decode_latents"]


@kernel(unaligned=("kv_indptr", "kv_indices", "kv_last_page_len"))
def decode_latents(
    q_nope: tl.tensor, q_pe: tl.tensor, ckv: tl.tensor, kpe: tl.tensor,
    kv_indptr: tl.tensor, kv_indices: tl.tensor, kv_last_page_len: tl.tensor,
    out: tl.tensor, parts: tl.tensor,
    scale: tl.float32, batch: tl.int32, heads: tl.int32, listed: tl.int32, total_pages: tl.int32,
    share: tl.int32, pieces: tl.int32,
    n_row: tl.int64, n_head: tl.int64, n_column: tl.int64,
    r_row: tl.int64, r_head: tl.int64, r_column: tl.int64,
    c_page: tl.int64, c_row: tl.int64, c_column: tl.int64,
    k_page: tl.int64, k_row: tl.int64, k_column: tl.int64,
    SPLIT: tl.constexpr, SHIFT: tl.constexpr, WIDTH: tl.constexpr, WIDTH_R: tl.constexpr,
    LANE: tl.constexpr, PAGE: tl.constexpr, ALIGN: tl.constexpr, IDS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """Attend BLOCK_M heads to a piece of a sequence.

    Args:
        q_nope, q_pe: ``[B, H, L]`` and ``[B, H, R]``; any strides, as of the caches.
        ckv, kpe: ``[P, PAGE, L]`` and ``[P, PAGE, R]``.
        kv_indptr, kv_indices, kv_last_page_len: The page table.
        out: ``[B, H, L]``, contiguous: what a sequence of one piece gives.
        parts: What pieces give, as in `decode`.
        scale: Multiplier that takes logits to powers of 2.
        batch: Sequences.
        heads: Query heads; those of a sequence are in programs side by side, which share tiles.
        listed, total_pages: Lengths of kv_indices and of ckv.
        share, pieces: As in `decode`.
        n_row, ..., k_column: Strides in lanes; those of columns are used where LANE is 1.
        SHIFT: Power of 2 that weights are multiplied by: keeps small ones normal in float16.
        ALIGN: Pages of a tile, at least one.
        IDS: How many ids of pages a tile has, where they are loaded one by one; else 0.
    """
    groups = tl.cdiv(heads, BLOCK_M)
    slot, part = tl.program_id(0) // groups, tl.program_id(0) % groups
    sequence, piece, most = find_piece(
        slot, kv_indptr, batch, share, pieces, False, SPLIT, ALIGN, BLOCK_B
    )
    begin, pages, length = listed_pages(sequence, kv_indptr, kv_last_page_len, listed, PAGE)
    size = piece_size(pages, most, ALIGN) if SPLIT else pages
    if (piece > 0) & (piece * size >= pages):
        return
    start = piece * size * PAGE
    end = tl.minimum(start + size * PAGE, length)

    head = part * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = head < heads
    n_at = sequence.to(tl.int64) * (n_row * LANE) + head.to(tl.int64) * (n_head * LANE)
    r_at = sequence.to(tl.int64) * (r_row * LANE) + head.to(tl.int64) * (r_head * LANE)
    latent_rows = gathered(q_nope, n_at, exists, n_column, WIDTH, BLOCK_L, LANE)
    rotated_rows = gathered(q_pe, r_at, exists, r_column, WIDTH_R, BLOCK_R, LANE)
    kv_indices += begin
    sums = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    ids = ids_of_tile(kv_indices, start, end, PAGE, IDS)
    for at in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        key = at + tl.arange(0, BLOCK_N)
        inside = key < end
        page = pages_of_keys(ids, kv_indices, key, at, end, total_pages, PAGE, IDS)
        c_rows = rows_of(key, page, c_page, c_row, LANE, PAGE)
        k_rows = rows_of(key, page, k_page, k_row, LANE, PAGE)
        ids = ids_of_tile(kv_indices, at + BLOCK_N, end, PAGE, IDS)
        rotated = gathered(kpe, k_rows, inside, k_column, WIDTH_R, BLOCK_R, LANE)
        latents = gathered(ckv, c_rows, inside, c_column, WIDTH, BLOCK_L, LANE)
        logits = tl.dot(latent_rows, latents.T, input_precision="ieee")
        others = tl.dot(rotated_rows, rotated.T, input_precision="ieee")
        # Products behind a branch: those that lead to another one are made twice by 8 warps.
        if at + BLOCK_N > end:
            logits = tl.where(inside[None, :], logits, float("-inf"))
            others = tl.where(inside[None, :], others, 0.0)
        logits += others
        weights, shrink, top, total = weigh(logits, scale, top, total, SHIFT)
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(latents.dtype), latents, sums, input_precision="ieee")

    row = sequence.to(tl.int64) * heads + head
    if size >= pages:
        store_rows(out, sums, total, row, exists, WIDTH, BLOCK_L)
    elif SPLIT:
        row = slot.to(tl.int64) * heads + head
        slots = tl.num_programs(0) // groups
        store_piece(parts, sums, top, total, row, slots * heads, exists, WIDTH, BLOCK_L)
