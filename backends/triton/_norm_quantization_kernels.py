"""Normalizes rows, with or without a residual that is added first, and quantizes them at once.

Sums are those of the norm alone, in its order, for `whole` rows and for those in pieces, which are
`held` in registers or `looped`.
"""

from __future__ import annotations

import triton.language as tl

from ._arithmetic import narrowed, rounded, widened
from ._launch import device_function, kernel
from ._norm_kernels import _add, _piece, _put, added, inverse_of
from ._quantization_kernels import codes, encode_row, scale_of, shared_codes, store_scales
from ._rows import offset, pieces_of, tile_rows

__all__ = ["held", "looped", "whole"]


@kernel(unaligned=("given",))
def whole(
    x: tl.tensor, r: tl.tensor, w: tl.tensor, q: tl.tensor, s: tl.tensor, total: tl.tensor,
    given: tl.tensor, rows: tl.int64, lanes: tl.int32, x_step: tl.int64, x_outer: tl.int64,
    r_step: tl.int64, r_outer: tl.int64, inner: tl.int64, eps: tl.float64,
    LARGEST: tl.constexpr, INT8: tl.constexpr, NESTED: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    LATE: tl.constexpr, EVEN: tl.constexpr,
) -> None:  # fmt: skip
    """Take ROWS rows, each read once, EVEN ones and LATE weights as in the norm alone."""
    columns = lanes * LANE
    row = tile_rows(tl.program_id(0), ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    inside = cols < columns
    mask = inside
    if ROWS > 1:
        mask = inside & (row < rows)
    target = row * lanes * LANE
    x_row = x + offset(row, x_step, x_outer, inner, LANE, NESTED)
    v = _piece(x_row + cols, mask, EVEN, "").to(tl.float32)
    if not LATE:
        gain = _piece(w + cols, inside, EVEN, "")
    if r is not None:
        v = _add(v, r + offset(row, r_step, r_outer, inner, LANE, NESTED) + cols, mask, EVEN)
        _put(total + target + cols, v, mask, EVEN)
    mean_square = tl.sum(v * v, 1, keep_dims=True) / columns.to(tl.float32)
    v *= tl.rsqrt(mean_square + tl.full([1, 1], eps, tl.float32))
    if LATE:
        gain = _piece(w + cols, inside, EVEN, "")
    v *= gain.to(tl.float32)
    v = rounded(v, x)  # what the norm alone would have stored
    v, scale = shared_codes(v, given, LARGEST, INT8, ROWS, BLOCK, GROUP)
    _put(q + target + cols, v, mask, EVEN)
    store_scales(s, scale, given, row, rows, 0, columns, BLOCK, GROUP)


@kernel(unaligned=("given",))
def held(
    x: tl.tensor, r: tl.tensor, w: tl.tensor, q: tl.tensor, s: tl.tensor, total: tl.tensor,
    given: tl.tensor, rows: tl.int64, lanes: tl.int32, x_step: tl.int64, x_outer: tl.int64,
    r_step: tl.int64, r_outer: tl.int64, inner: tl.int64, eps: tl.float64,
    LARGEST: tl.constexpr, INT8: tl.constexpr, NESTED: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Take one row of PIECES times BLOCK elements, read once."""
    columns = lanes * LANE
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    target = row * lanes * LANE
    parts = pieces_of(x + offset(row, x_step, x_outer, inner, LANE, NESTED), BLOCK, PIECES)
    if r is not None:
        r_row = r + offset(row, r_step, r_outer, inner, LANE, NESTED)
        parts = added(parts, r_row, total + target, BLOCK, PIECES)
    inverse = inverse_of(parts, columns, eps, tl.float32, PIECES)
    normal: tl.tuple = ()
    for piece in tl.static_range(PIECES):
        gain = widened(tl.load(w + piece * BLOCK + place, eviction_policy="evict_last"))
        v = widened(parts[piece]) * inverse * gain.to(tl.float32)
        normal += (narrowed(v, x),)  # what the norm alone would have stored
    if GROUP:
        for piece in tl.static_range(PIECES):
            v = widened(normal[piece])
            v, scale = shared_codes(v, None, LARGEST, INT8, 1, BLOCK, GROUP)
            _put(q + target + piece * BLOCK + place[None, :], v, None, True)
            store_scales(s, scale, None, row, rows, piece * BLOCK, columns, BLOCK, GROUP)
    else:
        scale = encode_row(normal, q + target, given, LARGEST, INT8, BLOCK, PIECES)
        store_scales(s, scale, given, row, rows, 0, columns, BLOCK, 0)


@device_function
def _normalized(
    x: tl.tensor, w: tl.tensor, cols: tl.tensor, mask: tl.tensor, inverse: tl.tensor,
    EVEN: tl.constexpr, KEEP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Give a piece of a normalized row as the norm alone would have stored it."""
    v = _piece(x + cols, mask, EVEN, KEEP).to(tl.float32) * inverse
    v *= _piece(w + cols, mask, EVEN, "evict_last").to(tl.float32)
    return rounded(v, x)


@kernel(unaligned=("given",))
def looped(
    x: tl.tensor, r: tl.tensor, w: tl.tensor, q: tl.tensor, s: tl.tensor, total: tl.tensor,
    given: tl.tensor, rows: tl.int64, lanes: tl.int32, x_step: tl.int64, x_outer: tl.int64,
    r_step: tl.int64, r_outer: tl.int64, inner: tl.int64, eps: tl.float64,
    LARGEST: tl.constexpr, INT8: tl.constexpr, NESTED: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Take one row in pieces, from caches but for the first time."""
    columns = lanes * LANE
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    target = row * lanes * LANE
    v_row = x + offset(row, x_step, x_outer, inner, LANE, NESTED)
    squares = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, columns, BLOCK):
        mask = begin + place < columns
        v = _piece(v_row + begin + place, mask, EVEN, "evict_last").to(tl.float32)
        if r is not None:
            r_at = offset(row, r_step, r_outer, inner, LANE, NESTED)
            v = _add(v, r + r_at + begin + place, mask, EVEN)
            tl.store(total + target + begin + place, v.to(total.dtype.element_ty), mask)
        squares = tl.fma(v, v, squares)
    if r is not None:
        v_row = total + target
    mean_square = tl.sum(squares) / columns.to(tl.float32)
    inverse = tl.rsqrt(mean_square + tl.full([1, 1], eps, tl.float32))
    place = tl.arange(0, BLOCK)[None, :]
    scale = tl.full([1, 1], 1.0, tl.float32)
    if given is not None:
        scale = tl.load(given + tl.arange(0, 1)[:, None])
    elif GROUP == 0:
        size = tl.zeros([1, BLOCK], tl.float32)
        for begin in range(0, columns, BLOCK):
            cols = begin + place
            v = _normalized(v_row, w, cols, cols < columns, inverse, EVEN, "evict_last")
            size = tl.maximum(size, tl.abs(v))
        scale = scale_of(tl.max(size, 1, keep_dims=True), LARGEST)
    each = tl.div_rn(1.0, scale)
    for begin in range(0, columns, BLOCK):
        cols = begin + place
        v = _normalized(v_row, w, cols, cols < columns, inverse, EVEN, "evict_first")
        if GROUP:
            v, found = shared_codes(v, None, LARGEST, INT8, 1, BLOCK, GROUP)
            store_scales(s, found, None, row, rows, begin, columns, BLOCK, GROUP)
        else:
            v = codes(v, each, LARGEST, INT8)
        tl.store(q + target + cols, v.to(q.dtype.element_ty), cols < columns)
    if GROUP == 0:
        store_scales(s, scale, given, row, rows, 0, columns, BLOCK, 0)
