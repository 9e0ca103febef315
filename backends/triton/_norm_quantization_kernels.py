"""Normalizes rows, with or without a residual that is added first, and quantizes them at once.

`whole` and `looped` sum a row in the order of the kernels of these names that only normalize.
"""

from __future__ import annotations

import triton.language as tl

from ._launch import device_function, kernel
from ._norm_kernels import _add, _piece, _vector
from ._quantization_kernels import codes, scale_of
from ._rows import offset

__all__ = ["looped", "whole"]


@device_function
def _normal(
    v_row: tl.tensor, w: tl.tensor, at: tl.tensor, columns: tl.tensor, inverse: tl.tensor,
    EVEN: tl.constexpr, KEEP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Give a piece of a normalized row, rounded as the norm alone would have stored it."""
    v = _piece(v_row + at, at < columns, EVEN, KEEP)
    gain = _piece(w + at, at < columns, EVEN, "evict_last").to(tl.float32)
    return (v.to(tl.float32) * inverse * gain).to(v.dtype).to(tl.float32)


@kernel()
def whole(
    x: tl.tensor, r: tl.tensor, w: tl.tensor, q: tl.tensor, s: tl.tensor, total: tl.tensor,
    rows: tl.int64, lanes: tl.int32, x_step: tl.int64, x_outer: tl.int64,
    r_step: tl.int64, r_outer: tl.int64, inner: tl.int64, eps: tl.float64,
    LARGEST: tl.constexpr, INT8: tl.constexpr, NESTED: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, LATE: tl.constexpr,
) -> None:  # fmt: skip
    """Take ROWS rows, each read once; the weight with them, or LATE as in the norm alone."""
    columns = lanes * LANE
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    inside = cols < columns
    mask = inside
    if ROWS > 1:
        mask = inside & (row < rows)
    x_at = offset(row, x_step, x_outer, inner, LANE, NESTED) + cols
    target = row * lanes * LANE + cols
    v = tl.load(x + x_at, mask, other=0.0).to(tl.float32)
    if not LATE:
        gain = _vector(w, cols, inside)
    if r is not None:
        v = _add(v, r, offset(row, r_step, r_outer, inner, LANE, NESTED) + cols, mask)
        tl.store(total + target, v.to(total.dtype.element_ty), mask)
    mean_square = tl.sum(v * v, 1, keep_dims=True) / columns.to(tl.float32)
    v *= tl.rsqrt(mean_square + tl.full([1, 1], eps, tl.float32))
    if LATE:
        gain = _vector(w, cols, inside)
    v *= gain.to(tl.float32)
    v = v.to(x.dtype.element_ty).to(tl.float32)  # what the norm alone would have stored
    scale = scale_of(tl.max(tl.abs(v), 1, keep_dims=True), LARGEST)
    v = codes(v, tl.div_rn(1.0, scale), LARGEST, INT8)
    tl.store(q + target, v.to(q.dtype.element_ty), mask)
    tl.store(s + row, scale, row < rows)


@kernel()
def looped(
    x: tl.tensor, r: tl.tensor, w: tl.tensor, q: tl.tensor, s: tl.tensor, total: tl.tensor,
    rows: tl.int64, lanes: tl.int32, x_step: tl.int64, x_outer: tl.int64,
    r_step: tl.int64, r_outer: tl.int64, inner: tl.int64, eps: tl.float64,
    LARGEST: tl.constexpr, INT8: tl.constexpr, NESTED: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
) -> None:  # fmt: skip
    """Take one row in pieces: caches keep it while it is read for its sum, its scale, its codes."""
    columns = lanes * LANE
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    v_row = x + offset(row, x_step, x_outer, inner, LANE, NESTED)
    q_row = q + row * lanes * LANE
    if r is not None:
        r_at = offset(row, r_step, r_outer, inner, LANE, NESTED)
    squares = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, columns, BLOCK):
        mask = begin + place < columns
        v = _piece(v_row + begin + place, mask, EVEN, "evict_last").to(tl.float32)
        if r is not None:
            v = _add(v, r, r_at + begin + place, mask)
            target = total + row * lanes * LANE + begin + place
            tl.store(target, v.to(total.dtype.element_ty), mask)
        squares = tl.fma(v, v, squares)
    mean_square = tl.sum(squares) / columns.to(tl.float32)
    inverse = tl.rsqrt(mean_square + tl.full([1], eps, tl.float32))
    if r is not None:
        v_row = total + row * lanes * LANE
    largest = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, columns, BLOCK):
        v = _normal(v_row, w, begin + place, columns, inverse, EVEN, "evict_last")
        largest = tl.maximum(largest, tl.abs(v))
    scale = scale_of(tl.max(largest, 0, keep_dims=True), LARGEST)
    factor = tl.div_rn(1.0, scale)
    for begin in range(0, columns, BLOCK):
        at = begin + place
        v = _normal(v_row, w, at, columns, inverse, EVEN, "evict_first")
        code = codes(v, factor, LARGEST, INT8).to(q.dtype.element_ty)
        tl.store(q_row + at, code, at < columns)
    tl.store(s + row + tl.arange(0, 1), scale)
