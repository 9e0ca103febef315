"""The Triton kernel of products of quantized matrices."""

from __future__ import annotations

import triton.language as tl

from ._launch import device_function, kernel

__all__ = ["multiply"]

_GROUPED_ROWS = tl.constexpr(8)  # tiles of so many rows run together, so that `b` stays in L2


@device_function
def _tile(
    m: tl.tensor, n: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Give the first row and column of this program's tile."""
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    program = tl.program_id(0)
    band = _GROUPED_ROWS * tiles_n
    first = program // band * _GROUPED_ROWS
    rows = tl.minimum(tiles_m - first, _GROUPED_ROWS)
    inside = program % band
    return (first + inside % rows) * BLOCK_M, inside // rows * BLOCK_N


@kernel(unaligned=("scale_a", "scale_b", "bias"))
def multiply(
    a: tl.tensor,
    b: tl.tensor,
    scale_a: tl.tensor,
    scale_b: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    m: tl.int64,
    n_lanes: tl.int64,
    k_lanes: tl.int64,
    a_row: tl.int64,
    a_column: tl.int64,
    b_row: tl.int64,
    b_column: tl.int64,
    sa_row: tl.int64,
    sa_group: tl.int64,
    sb_group: tl.int64,
    sb_column: tl.int64,
    bias_step: tl.int64,
    LANE: tl.constexpr,
    N_LANE: tl.constexpr,
    A_PACKED: tl.constexpr,
    B_PACKED: tl.constexpr,
    WHOLE_K: tl.constexpr,
    GROUPED: tl.constexpr,
    SHARED: tl.constexpr,
    INT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Write one tile of ``(a * scale_a) @ (b * scale_b) + bias``.

    K and the strides of packed matrices are in units of ``LANE`` elements, N in units of
    ``N_LANE``. ``A_PACKED`` and ``B_PACKED`` say that elements along K are neighbours, ``WHOLE_K``
    that K is a multiple of ``BLOCK_K``, ``GROUPED`` that each step along K has scales of its own,
    ``SHARED`` how many columns share a scale of ``b``.
    """
    n, k = n_lanes * N_LANE, k_lanes * LANE
    row, column = _tile(m, n, BLOCK_M, BLOCK_N)
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    inside_m, inside_n = rows < m, columns < n
    # Rows behind the last one read that one: what they give isn't written.
    at_m = tl.where(inside_m, rows, m - 1).to(tl.int64)
    at_n = tl.where(inside_n, columns, n - 1).to(tl.int64)
    a_at = a + at_m[:, None] * (a_row * LANE)
    b_at = b + at_n[None, :] * (b_column * LANE)
    sa_at = scale_a + at_m * sa_row
    sb_at = scale_b + at_n // SHARED * sb_column
    if INT:
        whole = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(tl.cdiv(k, BLOCK_K)):
        along = i * BLOCK_K + steps.to(tl.int64)
        a_k = along if A_PACKED else along * a_column
        b_k = along if B_PACKED else along * b_row
        if WHOLE_K:
            x = tl.load(a_at + a_k[None, :])
            w = tl.load(b_at + b_k[:, None])
        else:
            x = tl.load(a_at + a_k[None, :], mask=(along < k)[None, :], other=0 if INT else 0.0)
            w = tl.load(b_at + b_k[:, None], mask=(along < k)[:, None], other=0 if INT else 0.0)
        if GROUPED:
            scale = tl.load(sa_at + i * sa_group)[:, None] * tl.load(sb_at + i * sb_group)[None, :]
            total += tl.dot(x, w, out_dtype=tl.int32 if INT else tl.float32).to(tl.float32) * scale
        elif INT:
            whole = tl.dot(x, w, whole, out_dtype=tl.int32)
        else:
            # Tensor cores keep 13 bits of float8's sums: they are promoted once a step.
            total = tl.dot(x, w, total, max_num_imprecise_acc=BLOCK_K)
    if not GROUPED:
        if INT:
            total = whole.to(tl.float32)
        total = total * (tl.load(sa_at)[:, None] * tl.load(sb_at)[None, :])
    if bias is not None:
        total += tl.load(bias + at_n * bias_step).to(tl.float32)[None, :]
    out = y + rows[:, None].to(tl.int64) * n + columns[None, :]
    tl.store(out, total.to(y.dtype.element_ty), mask=inside_m[:, None] & inside_n[None, :])
