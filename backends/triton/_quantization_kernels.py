"""Quantizations: of rows with a scale each, and of a tensor with one scale.

`whole` keeps rows in registers, `held` keeps them there in pieces, `looped` walks rows that are too
long for that. A tensor takes `sizes`, which leaves the largest magnitudes of some pieces, and
`encoded`, which reads all of them.
"""

from __future__ import annotations

import triton.language as tl

from ._arithmetic import larger, widened
from ._launch import device_function, kernel
from ._rows import offset, pieces_of, tile_rows

__all__ = [
    "codes", "encode_row", "encoded", "held", "looped", "scale_of", "shared_codes", "sizes",
    "store_scales", "whole",
]  # fmt: skip


@device_function
def scale_of(amax: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Divide as IEEE 754 has it, once a row; the floor is that of the op's contract."""
    return tl.div_rn(tl.maximum(amax, 1e-10), tl.full(amax.shape, LARGEST, tl.float32))


@device_function
def codes(v: tl.tensor, inverse: tl.tensor, LARGEST: tl.constexpr, INT8: tl.constexpr) -> tl.tensor:
    """Give what a conversion to the codes' dtype has to take; NaN stays NaN.

    A product with a reciprocal errs by less than two units in the last place of float32, and is
    exact where the scale is a power of two.
    """
    v = tl.clamp(v * inverse, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if INT8:  # whole numbers are all that is left of a float32 next to 1.5 * 2^23
        v = (v + 12582912.0) - 12582912.0
    return v


@device_function
def shared_codes(
    v: tl.tensor, given: tl.tensor, LARGEST: tl.constexpr, INT8: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Give what codes of ROWS rows are made of, and scales: of rows, of groups, or the given."""
    if given is not None:
        scale = tl.load(given + tl.arange(0, 1)[:, None])
        v = codes(v, tl.div_rn(1.0, scale), LARGEST, INT8)
    elif GROUP:
        v = tl.reshape(v, [ROWS, BLOCK // GROUP, GROUP])
        scale = scale_of(tl.max(tl.abs(v), 2, keep_dims=True), LARGEST)
        v = tl.reshape(codes(v, tl.div_rn(1.0, scale), LARGEST, INT8), [ROWS, BLOCK])
        scale = tl.reshape(scale, [ROWS, BLOCK // GROUP])
    else:
        scale = scale_of(tl.max(tl.abs(v), 1, keep_dims=True), LARGEST)
        v = codes(v, tl.div_rn(1.0, scale), LARGEST, INT8)
    return v, scale


@device_function
def store_scales(
    s: tl.tensor, scale: tl.tensor, given: tl.tensor, row: tl.tensor, rows: tl.tensor,
    begin: tl.tensor, columns: tl.tensor, BLOCK: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Store what `shared_codes` gives of columns from `begin` on; a given one once."""
    one = tl.arange(0, 1)[:, None]
    if given is not None:
        tl.store(s + one, scale, tl.program_id(0) + one == 0)
    elif GROUP:
        group, groups = begin // GROUP + tl.arange(0, BLOCK // GROUP)[None, :], columns // GROUP
        tl.store(s + row * groups + group, scale, (row + one < rows) & (group < groups))
    else:
        tl.store(s + row + one, scale, row + one < rows)


@device_function
def encode_row(
    parts: tl.tuple, q: tl.tensor, given: tl.tensor,
    LARGEST: tl.constexpr, INT8: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Store the codes of a row in pieces, and give their scale, which may be given."""
    if given is not None:
        scale = tl.load(given + tl.arange(0, 1))
    else:
        size = tl.zeros(parts[0].shape, parts[0].dtype)
        for piece in tl.static_range(PIECES):
            size = larger(size, parts[piece])
        scale = scale_of(tl.max(size.to(tl.float32), 0, keep_dims=True), LARGEST)
    inverse = tl.div_rn(1.0, scale)
    for piece in tl.static_range(PIECES):
        v = codes(widened(parts[piece]), inverse, LARGEST, INT8)
        tl.store(q + piece * BLOCK + tl.arange(0, BLOCK), v.to(q.dtype.element_ty))
    return scale


@kernel()
def held(
    x: tl.tensor, q: tl.tensor, s: tl.tensor,
    rows: tl.int64, lanes: tl.int32, x_step: tl.int64, x_outer: tl.int64, inner: tl.int64,
    LARGEST: tl.constexpr, INT8: tl.constexpr, NESTED: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
) -> None:  # fmt: skip
    """Quantize one row of PIECES times BLOCK elements, read once."""
    row = tl.program_id(0).to(tl.int64)
    parts = pieces_of(x + offset(row, x_step, x_outer, inner, LANE, NESTED), BLOCK, PIECES)
    scale = encode_row(parts, q + row * lanes * LANE, None, LARGEST, INT8, BLOCK, PIECES)
    tl.store(s + row + tl.arange(0, 1), scale)


@kernel()
def whole(
    x: tl.tensor, q: tl.tensor, s: tl.tensor,
    rows: tl.int64, lanes: tl.int32, x_step: tl.int64, x_outer: tl.int64, inner: tl.int64,
    LARGEST: tl.constexpr, INT8: tl.constexpr, NESTED: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Quantize ROWS rows, each read once."""
    row = tile_rows(tl.program_id(0), ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    mask = cols < lanes * LANE
    if ROWS > 1:
        mask &= row < rows
    x_row = x + offset(row, x_step, x_outer, inner, LANE, NESTED)
    v = tl.load(x_row + cols, mask, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(v), 1, keep_dims=True), LARGEST)
    v = codes(v, tl.div_rn(1.0, scale), LARGEST, INT8)
    tl.store(q + row * lanes * LANE + cols, v.to(q.dtype.element_ty), mask)
    one = row + tl.arange(0, 1)[:, None]
    tl.store(s + one, scale, one < rows)


@kernel()
def looped(
    x: tl.tensor, q: tl.tensor, s: tl.tensor,
    rows: tl.int64, lanes: tl.int32, x_step: tl.int64, x_outer: tl.int64, inner: tl.int64,
    LARGEST: tl.constexpr, INT8: tl.constexpr, NESTED: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Quantize one row in pieces, read twice: caches keep it for the second time."""
    columns = lanes * LANE
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    x_row = x + offset(row, x_step, x_outer, inner, LANE, NESTED)
    size = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, columns, BLOCK):
        at = begin + place
        v = tl.load(x_row + at, at < columns, other=0.0, eviction_policy="evict_last")
        size = tl.maximum(size, tl.abs(v.to(tl.float32)))
    scale = scale_of(tl.max(size, 0, keep_dims=True), LARGEST)
    inverse = tl.div_rn(1.0, scale)
    for begin in range(0, columns, BLOCK):
        at = begin + place
        v = tl.load(x_row + at, at < columns, other=0.0, eviction_policy="evict_first")
        v = codes(v.to(tl.float32), inverse, LARGEST, INT8)
        tl.store(q + row * lanes * LANE + at, v.to(q.dtype.element_ty), at < columns)
    tl.store(s + row + tl.arange(0, 1), scale)


@kernel()
def sizes(
    x: tl.tensor, partial: tl.tensor, lanes: tl.int64, pieces: tl.int64,
    LANE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Leave the largest magnitude of the program's own piece and of each pieces-th one after it."""
    elements = lanes * LANE
    program = tl.program_id(0).to(tl.int64)
    size = tl.zeros([BLOCK], tl.float32)
    for begin in range(program * BLOCK, elements, pieces * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        v = tl.load(x + at, at < elements, other=0.0, eviction_policy="evict_last")
        size = tl.maximum(size, tl.abs(v.to(tl.float32)))
    tl.store(partial + program, tl.max(size, 0))


@kernel(unaligned=("given",))
def encoded(
    x: tl.tensor, q: tl.tensor, s: tl.tensor, partial: tl.tensor, given: tl.tensor,
    lanes: tl.int64, pieces: tl.int64, LARGEST: tl.constexpr, INT8: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
) -> None:  # fmt: skip
    """Quantize one piece by the scale that is given, or by that of all sizes."""
    elements = lanes * LANE
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    one = tl.arange(0, 1)
    v = tl.load(x + at, at < elements, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if given is not None:
        scale = tl.load(given + one)
    else:
        piece = tl.arange(0, PIECES)
        found = tl.load(partial + piece, piece < pieces, other=0.0)
        scale = scale_of(tl.max(found, 0, keep_dims=True), LARGEST)
    v = codes(v, tl.div_rn(1.0, scale), LARGEST, INT8)
    tl.store(q + at, v.to(q.dtype.element_ty), at < elements)
    tl.store(s + one, scale, program + one == 0)
