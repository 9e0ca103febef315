"""Normalizations of rows: RMS and layer norm, with or without a residual that is added first.

`whole` keeps rows in registers, `held` keeps them there in pieces, `looped` walks rows that are too
long for that, and `stats` with `apply` split few long rows over several programs.
"""

from __future__ import annotations

import triton.language as tl

from ._arithmetic import narrowed, widened
from ._launch import device_function, kernel
from ._rows import offset, pieces_of, tile_rows

__all__ = [
    "added", "apply", "held", "inverse_of", "inverse_root", "looped", "stats", "whole",
]  # fmt: skip


@device_function
def _add(v: tl.tensor, r: tl.tensor, mask: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """Add the residual and round as it will be stored: the norm is that of the rounded sum."""
    wide = v.dtype
    return (v + _piece(r, mask, EVEN, "").to(wide)).to(r.dtype.element_ty).to(wide)


@device_function
def inverse_root(x: tl.tensor) -> tl.tensor:
    """Give 1 / sqrt(x)."""
    return 1.0 / tl.sqrt(x) if x.dtype == tl.float64 else tl.rsqrt(x)


@device_function
def _piece(at: tl.tensor, mask: tl.tensor, EVEN: tl.constexpr, KEEP: tl.constexpr) -> tl.tensor:
    """Load a piece of a row; loads without a mask are under way together."""
    if EVEN:
        return tl.load(at, eviction_policy=KEEP)
    return tl.load(at, mask, other=0.0, eviction_policy=KEEP)


@device_function
def _put(at: tl.tensor, v: tl.tensor, mask: tl.tensor, EVEN: tl.constexpr) -> None:
    """Store what `_piece` loads the like of."""
    if EVEN:
        tl.store(at, v.to(at.dtype.element_ty))
    else:
        tl.store(at, v.to(at.dtype.element_ty), mask)


@device_function
def _scaled(v: tl.tensor, gain: tl.tensor, shift: tl.tensor, ONE_PLUS: tl.constexpr) -> tl.tensor:
    """Scale and shift in the dtype of v, where there is a weight and a bias."""
    if gain is not None:
        wide = gain.to(v.dtype)
        if ONE_PLUS:
            wide += 1.0
        v *= wide
    if shift is not None:
        v += shift.to(v.dtype)
    return v


@kernel()
def whole(
    x: tl.tensor, r: tl.tensor, w: tl.tensor, b: tl.tensor, y: tl.tensor, s: tl.tensor,
    rows: tl.int64, lanes: tl.int32, x_step: tl.int64, x_outer: tl.int64,
    r_step: tl.int64, r_outer: tl.int64, inner: tl.int64, eps: tl.float64,
    CENTER: tl.constexpr, ONE_PLUS: tl.constexpr, IN_PLACE: tl.constexpr, NESTED: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, LATE: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:  # fmt: skip
    """Normalize ROWS rows, each read once; they are EVEN where one row fills the tile.

    Weight and bias are loaded with the rows, or LATE, so that fewer registers hold more rows.
    """
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    columns = lanes * LANE
    count = columns.to(wide)
    row = tile_rows(tl.program_id(0), ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    inside = cols < columns
    mask = inside
    if ROWS > 1:
        mask = inside & (row < rows)
    x_at = offset(row, x_step, x_outer, inner, LANE, NESTED)
    target = row * lanes * LANE
    v = _piece(x + x_at + cols, mask, EVEN, "").to(wide)
    if not LATE:
        gain = None if w is None else _piece(w + cols, inside, EVEN, "")
        shift = None if b is None else _piece(b + cols, inside, EVEN, "")
    if r is not None:
        r_at = offset(row, r_step, r_outer, inner, LANE, NESTED)
        v = _add(v, r + r_at + cols, mask, EVEN)
        _put(s + (r_at if IN_PLACE else target) + cols, v, mask, EVEN)
    if CENTER:
        v = tl.where(mask, v - tl.sum(v, 1, keep_dims=True) / count, 0.0)
    mean_square = tl.sum(v * v, 1, keep_dims=True) / count
    v *= inverse_root(mean_square + tl.full([1, 1], eps, wide))
    if LATE:
        gain = None if w is None else _piece(w + cols, inside, EVEN, "")
        shift = None if b is None else _piece(b + cols, inside, EVEN, "")
    v = _scaled(v, gain, shift, ONE_PLUS)
    _put(y + (x_at if IN_PLACE else target) + cols, v, mask, EVEN)


@device_function
def added(
    parts: tl.tuple, r: tl.tensor, s: tl.tensor, BLOCK: tl.constexpr, PIECES: tl.constexpr
) -> tl.tuple:
    """Add a residual to a row in pieces; give the rounded sum, and store it."""
    others = pieces_of(r, BLOCK, PIECES)
    sums: tl.tuple = ()
    for piece in tl.static_range(PIECES):
        v = narrowed(widened(parts[piece]) + widened(others[piece]), s)
        tl.store(s + piece * BLOCK + tl.arange(0, BLOCK), v)
        sums += (v,)
    return sums


@device_function
def inverse_of(
    parts: tl.tuple, columns: tl.tensor, eps: tl.tensor, wide: tl.constexpr, PIECES: tl.constexpr
) -> tl.tensor:
    """Give 1 / sqrt(mean of squares + eps) of a row in pieces, added up as `looped` does."""
    squares = tl.zeros(parts[0].shape, wide)
    for piece in tl.static_range(PIECES):
        v = widened(parts[piece])
        squares = tl.fma(v, v, squares)
    return inverse_root(tl.sum(squares) / columns.to(wide) + tl.full([1], eps, wide))


@kernel()
def held(
    x: tl.tensor, r: tl.tensor, w: tl.tensor, b: tl.tensor, y: tl.tensor, s: tl.tensor,
    rows: tl.int64, lanes: tl.int32, x_step: tl.int64, x_outer: tl.int64,
    r_step: tl.int64, r_outer: tl.int64, inner: tl.int64, eps: tl.float64,
    ONE_PLUS: tl.constexpr, IN_PLACE: tl.constexpr, NESTED: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
) -> None:  # fmt: skip
    """Normalize one row of PIECES times BLOCK elements about zero, read once."""
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    columns = lanes * LANE
    row = tl.program_id(0).to(tl.int64)
    x_at = offset(row, x_step, x_outer, inner, LANE, NESTED)
    target = row * lanes * LANE
    parts = pieces_of(x + x_at, BLOCK, PIECES)
    if r is not None:
        r_at = offset(row, r_step, r_outer, inner, LANE, NESTED)
        parts = added(parts, r + r_at, s + (r_at if IN_PLACE else target), BLOCK, PIECES)
    inverse = inverse_of(parts, columns, eps, wide, PIECES)
    y_row = y + (x_at if IN_PLACE else target)
    for piece in tl.static_range(PIECES):
        at = piece * BLOCK + tl.arange(0, BLOCK)
        gain = None if w is None else widened(tl.load(w + at, eviction_policy="evict_last"))
        shift = None if b is None else tl.load(b + at, eviction_policy="evict_last")
        v = _scaled(widened(parts[piece]) * inverse, gain, shift, ONE_PLUS)
        tl.store(y_row + at, narrowed(v, y))


@kernel()
def looped(
    x: tl.tensor, r: tl.tensor, w: tl.tensor, b: tl.tensor, y: tl.tensor, s: tl.tensor,
    rows: tl.int64, lanes: tl.int32, x_step: tl.int64, x_outer: tl.int64,
    r_step: tl.int64, r_outer: tl.int64, inner: tl.int64, eps: tl.float64,
    CENTER: tl.constexpr, ONE_PLUS: tl.constexpr, IN_PLACE: tl.constexpr, NESTED: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
) -> None:  # fmt: skip
    """Normalize one row in pieces, read twice: caches keep it for the second time, then drop it."""
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    columns = lanes * LANE
    count = columns.to(wide)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    x_row = x + offset(row, x_step, x_outer, inner, LANE, NESTED)
    y_row = y + row * lanes * LANE
    if IN_PLACE:
        y_row = y + offset(row, x_step, x_outer, inner, LANE, NESTED)
    if r is not None:
        r_at = offset(row, r_step, r_outer, inner, LANE, NESTED)
        s_at = r_at if IN_PLACE else row * lanes * LANE
    squares = tl.zeros([BLOCK], wide)
    means = tl.zeros([BLOCK], wide)
    for begin in range(0, columns, BLOCK):
        mask = begin + place < columns
        v = _piece(x_row + begin + place, mask, EVEN, "evict_last").to(wide)
        if r is not None:
            v = _add(v, r + r_at + begin + place, mask, EVEN)
            tl.store(s + s_at + begin + place, v.to(s.dtype.element_ty), mask)
        if CENTER:  # a mean and a sum of squares about it for each place of a piece
            away = tl.where(mask, v - means, 0.0)
            means += away / (begin // BLOCK + 1)
            squares += tl.where(mask, away * (v - means), 0.0)
        else:  # fused: fewer registers, so that the loads of a piece are under way together
            squares = tl.fma(v, v, squares)
    mean = 0.0
    if CENTER:
        pieces = tl.maximum((columns - place + BLOCK - 1) // BLOCK, 0).to(wide)
        mean = tl.sum(means * pieces) / count
        squares += pieces * (means - mean) * (means - mean)
    inverse = inverse_root(tl.sum(squares) / count + tl.full([1], eps, wide))
    v_row = x_row if r is None else s + s_at
    for begin in range(0, columns, BLOCK):
        mask = begin + place < columns
        v = _piece(v_row + begin + place, mask, EVEN, "evict_first").to(wide)
        if CENTER:
            v -= mean
        gain = None if w is None else _piece(w + begin + place, mask, EVEN, "evict_last")
        shift = None if b is None else _piece(b + begin + place, mask, EVEN, "evict_last")
        v = _scaled(v * inverse, gain, shift, ONE_PLUS)
        if EVEN:
            tl.store(y_row + begin + place, v.to(y.dtype.element_ty))
        else:
            tl.store(y_row + begin + place, v.to(y.dtype.element_ty), mask)


@kernel()
def stats(
    x: tl.tensor, r: tl.tensor, s: tl.tensor, partial: tl.tensor,
    lanes: tl.int32, pieces: tl.int32, x_step: tl.int64, x_outer: tl.int64,
    r_step: tl.int64, r_outer: tl.int64, inner: tl.int64,
    CENTER: tl.constexpr, IN_PLACE: tl.constexpr, NESTED: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Reduce one piece of one row: to its mean and the sum of squares about it."""
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    columns = lanes * LANE
    row = tl.program_id(0).to(tl.int64) // pieces
    begin = tl.program_id(0) % pieces * BLOCK
    cols = begin + tl.arange(0, BLOCK)
    mask = cols < columns
    v = tl.load(x + offset(row, x_step, x_outer, inner, LANE, NESTED) + cols, mask, other=0.0)
    v = v.to(wide)
    if r is not None:
        r_at = offset(row, r_step, r_outer, inner, LANE, NESTED)
        v = _add(v, r + r_at + cols, mask, False)
        s_at = r_at if IN_PLACE else row * lanes * LANE
        tl.store(s + s_at + cols, v.to(s.dtype.element_ty), mask)
    target = partial + tl.program_id(0).to(tl.int64) * 2
    mean = 0.0
    if CENTER:
        mean = tl.sum(v) / tl.minimum(columns - begin, BLOCK).to(wide)
        v = tl.where(mask, v - mean, 0.0)
        tl.store(target, mean)
    tl.store(target + 1, tl.sum(v * v))


@kernel()
def apply(
    v: tl.tensor, w: tl.tensor, b: tl.tensor, y: tl.tensor, partial: tl.tensor,
    lanes: tl.int32, pieces: tl.int32, v_step: tl.int64, v_outer: tl.int64,
    y_step: tl.int64, y_outer: tl.int64, inner: tl.int64, eps: tl.float64,
    CENTER: tl.constexpr, ONE_PLUS: tl.constexpr, NESTED: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
) -> None:  # fmt: skip
    """Normalize one piece of one row by the statistics of all its pieces."""
    wide: tl.constexpr = tl.float64 if v.dtype.element_ty == tl.float64 else tl.float32
    columns = lanes * LANE
    count = columns.to(wide)
    added = tl.full([1], eps, wide)
    row = tl.program_id(0).to(tl.int64) // pieces
    begin = tl.program_id(0) % pieces * BLOCK
    cols = begin + tl.arange(0, BLOCK)
    mask = cols < columns
    v_at = offset(row, v_step, v_outer, inner, LANE, NESTED)
    x = tl.load(v + v_at + cols, mask, other=0.0).to(wide)
    piece = tl.arange(0, PIECES)
    source = partial + (row * pieces + piece) * 2
    squares = tl.load(source + 1, piece < pieces, other=0.0)
    if CENTER:
        size = tl.minimum(columns - piece * BLOCK, BLOCK).to(wide)
        means = tl.load(source, piece < pieces, other=0.0)
        mean = tl.sum(tl.where(piece < pieces, means * size, 0.0)) / count
        squares += tl.where(piece < pieces, size * (means - mean) * (means - mean), 0.0)
        x -= mean
    x *= inverse_root(tl.sum(squares) / count + added)
    gain = None if w is None else _piece(w + cols, mask, False, "")
    shift = None if b is None else _piece(b + cols, mask, False, "")
    x = _scaled(x, gain, shift, ONE_PLUS)
    y_at = offset(row, y_step, y_outer, inner, LANE, NESTED)
    tl.store(y + y_at + cols, x.to(y.dtype.element_ty), mask)
