"""Normalizes rows, with or without a residual that is added first, and quantizes them at once."""

from __future__ import annotations

import triton.language as tl

from ._launch import kernel
from ._norm_kernels import _add, _vector
from ._quantization_kernels import shared_codes, store_scales
from ._rows import offset

__all__ = ["whole"]


@kernel(unaligned=("given",))
def whole(
    x: tl.tensor, r: tl.tensor, w: tl.tensor, q: tl.tensor, s: tl.tensor, total: tl.tensor,
    given: tl.tensor, rows: tl.int64, lanes: tl.int32, x_step: tl.int64, x_outer: tl.int64,
    r_step: tl.int64, r_outer: tl.int64, inner: tl.int64, eps: tl.float64,
    LARGEST: tl.constexpr, INT8: tl.constexpr, NESTED: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    LATE: tl.constexpr,
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
    v, scale = shared_codes(v, given, LARGEST, INT8, ROWS, BLOCK, GROUP)
    tl.store(q + target, v.to(q.dtype.element_ty), mask)
    store_scales(s, scale, given, row, rows, columns, BLOCK, GROUP)
