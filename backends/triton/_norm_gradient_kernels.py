"""Gradients of normalizations of rows: RMS and layer norm, with or without a residual's gradient.

`whole_gradient` keeps rows in registers; `gradient_sums` and `gradient_apply` walk rows that are
too long for that, in pieces. What the gradients of weight and bias add over the rows of a program
is kept, and `fold` adds what the programs found: in one order, so that equal calls give equal bits.
"""

from __future__ import annotations

import triton.language as tl

from ._launch import device_function, kernel
from ._norm_kernels import inverse_root
from ._rows import offset

__all__ = ["fold", "gradient_apply", "gradient_sums", "whole_gradient"]


@device_function
def _gained(d: tl.tensor, gain: tl.tensor, ONE_PLUS: tl.constexpr) -> tl.tensor:
    """Scale by the weight, where there is one."""
    if gain is not None:
        wide = gain.to(d.dtype)
        if ONE_PLUS:
            wide += 1.0
        d *= wide
    return d


@kernel()
def whole_gradient(
    x: tl.tensor, grad: tl.tensor, r: tl.tensor, w: tl.tensor, dx: tl.tensor, partial: tl.tensor,
    rows: tl.int64, each: tl.int32, lanes: tl.int32,
    x_step: tl.int64, x_outer: tl.int64, d_step: tl.int64, d_outer: tl.int64,
    r_step: tl.int64, r_outer: tl.int64, inner: tl.int64, eps: tl.float64,
    CENTER: tl.constexpr, ONE_PLUS: tl.constexpr, NESTED: tl.constexpr, LANE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Take ROWS rows at a time, `each` times; the next ones are loaded before they are needed."""
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    columns = lanes * LANE
    count = columns.to(wide)
    cols = tl.arange(0, BLOCK)[None, :]
    inside = cols < columns
    first = tl.program_id(0).to(tl.int64) * each * ROWS
    end = tl.minimum(rows, first + each * ROWS)
    row = first + tl.arange(0, ROWS)[:, None]
    gain = None if w is None else tl.load(w + cols, inside, other=0.0)
    dw = tl.zeros([ROWS, BLOCK], wide)
    db = tl.zeros([ROWS, BLOCK], wide)
    mask = inside & (row < end)
    v_next = tl.load(x + offset(row, x_step, x_outer, inner, LANE, NESTED) + cols, mask, other=0.0)
    d_next = tl.load(
        grad + offset(row, d_step, d_outer, inner, LANE, NESTED) + cols, mask, other=0.0
    )
    for _ in range(each):
        v, d, at = v_next.to(wide), d_next.to(wide), row
        here = mask
        row += ROWS
        mask = inside & (row < end)
        x_at = offset(row, x_step, x_outer, inner, LANE, NESTED) + cols
        v_next = tl.load(x + x_at, mask, other=0.0)
        d_at = offset(row, d_step, d_outer, inner, LANE, NESTED) + cols
        d_next = tl.load(grad + d_at, mask, other=0.0)
        if CENTER:
            v = tl.where(here, v - tl.sum(v, 1, keep_dims=True) / count, 0.0)
        mean_square = tl.sum(v * v, 1, keep_dims=True) / count
        inverse = inverse_root(mean_square + tl.full([1, 1], eps, wide))
        v *= inverse
        g = _gained(d, gain, ONE_PLUS)
        slope = tl.sum(g * v, 1, keep_dims=True) / count
        if CENTER:
            g -= tl.sum(g, 1, keep_dims=True) / count
        result = (g - v * slope) * inverse
        if r is not None:
            r_at = offset(at, r_step, r_outer, inner, LANE, NESTED) + cols
            result += tl.load(r + r_at, here, other=0.0).to(wide)
        tl.store(dx + at * lanes * LANE + cols, result.to(dx.dtype.element_ty), here)
        if partial is not None:
            dw += d * v
            if CENTER:
                db += d
    if partial is not None:
        PLANES: tl.constexpr = 2 if CENTER else 1
        target = partial + tl.program_id(0).to(tl.int64) * PLANES * lanes * LANE + cols
        tl.store(target, tl.sum(dw, 0, keep_dims=True), inside)
        if CENTER:
            tl.store(target + columns, tl.sum(db, 0, keep_dims=True), inside)


@kernel()
def gradient_sums(
    x: tl.tensor, grad: tl.tensor, w: tl.tensor, s: tl.tensor,
    lanes: tl.int32, x_step: tl.int64, x_outer: tl.int64, d_step: tl.int64, d_outer: tl.int64,
    inner: tl.int64, eps: tl.float64,
    CENTER: tl.constexpr, ONE_PLUS: tl.constexpr, NESTED: tl.constexpr, LANE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Reduce one row to its mean, inverse root, and the means that its gradient subtracts."""
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    columns = lanes * LANE
    count = columns.to(wide)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    x_row = x + offset(row, x_step, x_outer, inner, LANE, NESTED)
    d_row = grad + offset(row, d_step, d_outer, inner, LANE, NESTED)
    mean = 0.0
    if CENTER:
        total = tl.zeros([BLOCK], wide)
        for begin in range(0, columns, BLOCK):
            total += tl.load(x_row + begin + place, begin + place < columns, other=0.0).to(wide)
        mean = tl.sum(total) / count
        tl.store(s + row * 4, mean)
    squares = tl.zeros([BLOCK], wide)
    products = tl.zeros([BLOCK], wide)
    grads = tl.zeros([BLOCK], wide)
    for begin in range(0, columns, BLOCK):
        mask = begin + place < columns
        v = tl.load(x_row + begin + place, mask, other=0.0).to(wide)
        d = tl.load(d_row + begin + place, mask, other=0.0).to(wide)
        gain = None if w is None else tl.load(w + begin + place, mask, other=0.0)
        g = _gained(d, gain, ONE_PLUS)
        if CENTER:
            v = tl.where(mask, v - mean, 0.0)
            grads += g
        squares += v * v
        products += g * v
    inverse = inverse_root(tl.sum(squares) / count + tl.full([1], eps, wide))
    one = tl.arange(0, 1)
    tl.store(s + row * 4 + 1 + one, inverse)
    tl.store(s + row * 4 + 2 + one, tl.sum(products) / count * inverse)
    if CENTER:
        tl.store(s + row * 4 + 3, tl.sum(grads) / count)


@kernel()
def gradient_apply(
    x: tl.tensor, grad: tl.tensor, r: tl.tensor, w: tl.tensor, s: tl.tensor, dx: tl.tensor,
    partial: tl.tensor,
    rows: tl.int64, each: tl.int32, lanes: tl.int32, pieces: tl.int32,
    x_step: tl.int64, x_outer: tl.int64, d_step: tl.int64, d_outer: tl.int64,
    r_step: tl.int64, r_outer: tl.int64, inner: tl.int64,
    CENTER: tl.constexpr, ONE_PLUS: tl.constexpr, NESTED: tl.constexpr, LANE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Write BLOCK columns of ROWS rows, `each` times."""
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    columns = lanes * LANE
    share = (tl.program_id(0) // pieces).to(tl.int64)
    cols = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = cols < columns
    end = tl.minimum(rows, (share + 1) * each * ROWS)
    row = share * each * ROWS + tl.arange(0, ROWS)[:, None]
    gain = None if w is None else tl.load(w + cols, inside, other=0.0)
    dw = tl.zeros([ROWS, BLOCK], wide)
    db = tl.zeros([ROWS, BLOCK], wide)
    for _ in range(each):
        mask = inside & (row < end)
        x_at = offset(row, x_step, x_outer, inner, LANE, NESTED) + cols
        v = tl.load(x + x_at, mask, other=0.0).to(wide)
        d_at = offset(row, d_step, d_outer, inner, LANE, NESTED) + cols
        d = tl.load(grad + d_at, mask, other=0.0).to(wide)
        inverse = tl.load(s + row * 4 + 1, row < end, other=0.0)
        g = _gained(d, gain, ONE_PLUS)
        if CENTER:
            v -= tl.load(s + row * 4, row < end, other=0.0)
            g -= tl.load(s + row * 4 + 3, row < end, other=0.0)
        v *= inverse
        result = (g - v * tl.load(s + row * 4 + 2, row < end, other=0.0)) * inverse
        if r is not None:
            r_at = offset(row, r_step, r_outer, inner, LANE, NESTED) + cols
            result += tl.load(r + r_at, mask, other=0.0).to(wide)
        tl.store(dx + row * lanes * LANE + cols, result.to(dx.dtype.element_ty), mask)
        if partial is not None:
            dw += d * v
            if CENTER:
                db += d
        row += ROWS
    if partial is not None:
        PLANES: tl.constexpr = 2 if CENTER else 1
        target = partial + share * PLANES * lanes * LANE + cols
        tl.store(target, tl.sum(dw, 0, keep_dims=True), inside)
        if CENTER:
            tl.store(target + columns, tl.sum(db, 0, keep_dims=True), inside)


@kernel()
def fold(
    partial: tl.tensor, dw: tl.tensor, db: tl.tensor,
    count: tl.int32, columns: tl.int32, pieces: tl.int32,
    PLANES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Add what the programs found for BLOCK columns of the gradient of weight or bias."""
    plane = tl.program_id(0) // pieces
    cols = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = cols < columns
    total = tl.zeros([ROWS, BLOCK], partial.dtype.element_ty)
    for begin in range(0, count, ROWS):
        row = begin + tl.arange(0, ROWS)[:, None]
        at = (row.to(tl.int64) * PLANES + plane) * columns + cols
        total += tl.load(partial + at, inside & (row < count), other=0.0)
    result = tl.sum(total, 0, keep_dims=True)
    if dw is not None:
        tl.store(dw + cols, result.to(dw.dtype.element_ty), cols < tl.where(plane == 0, columns, 0))
    if db is not None:
        tl.store(db + cols, result.to(db.dtype.element_ty), cols < tl.where(plane == 1, columns, 0))
