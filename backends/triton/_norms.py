"""Normalizes rows by one of three ways, chosen by the shape alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops.declarations._shared import accumulation_dtype

from . import _norm_kernels as kernels
from ._launch import INTERPRETED, INTERPRETED_TILE, Variant, remember
from ._rows import Rows, as_rows, as_vector, even_piece, held_pieces, lane_of, power_of_two

__all__ = [
    "FEW",
    "LAYER",
    "ONE_PLUS",
    "RMS",
    "add_normalize",
    "add_normalize_in_place",
    "normalize",
]

_CROWD = 512
_LONGEST = 32768  # bytes of a row that may stay in registers
_PIECE_BYTES = 16384
_SHORT_PIECE_BYTES = 8192
FEW = 8
_PIECE = 2048
_CONTIGUOUS = torch.contiguous_format


class Config(NamedTuple):
    """How a kernel takes rows that fit into registers.

    Attributes:
        rows: Rows of one program.
        threads: Threads of one program.
        late: Load weight and bias after the rows were reduced, for more rows at once.
    """

    rows: int
    threads: int
    late: bool = False


class Walk(NamedTuple):
    """How a kernel takes a row in pieces.

    Attributes:
        block: Elements of a piece.
        threads: Threads of one program.
        held: How many pieces registers hold, 0 where the row is read twice.
    """

    block: int
    threads: int
    held: int = 0


class Style(NamedTuple):
    """What is computed.

    Attributes:
        center: Subtract the mean first.
        one_plus: Scale by one plus the weight.
        in_place: Write over the inputs.
    """

    center: bool = False
    one_plus: bool = False
    in_place: bool = False


RMS = Style()
LAYER = Style(center=True)
ONE_PLUS = Style(one_plus=True)
_IN_PLACE = Style(in_place=True)


def config(block: int, columns: int, itemsize: int, crowded: bool, center: bool) -> Config:
    """Choose by the length of a row, and by whether there are more rows than `_CROWD`.

    Measured on an H200 in bfloat16. Few rows: a thread's 16 bytes arrive soonest. Many: 64 bytes a
    thread keep the memory busy (32 for rows of 8 KB: 20.7 us for rms_norm of 4096x4096, of which a
    copy takes 21.2), unless registers hold so much of a row (long, padded, or with a bias) that too
    few programs fit; then vectors come late: 135 against 195 us for layer_norm of 16384x8192, 136
    against 184 for rms_norm of 8192x16384, but 23.2 against 21.4 for 4096x4096.
    """
    size = block * itemsize
    if INTERPRETED:
        return Config(max(1, INTERPRETED_TILE // block), 32)
    if not crowded:
        return Config(1, min(max(size // 16, 32), 512 if size <= 16384 else 1024))
    rows = max(1, 2048 // size)
    padded = size >= 8192 and block > columns
    late = center or rows > 1 or size >= 32768 or padded
    each = 128 if padded else 32 if size == 8192 and not late else 64
    return Config(rows, min(max(size // each, 64), 1024), late)


def walk(columns: int, itemsize: int, crowded: bool, center: bool) -> Walk | None:
    """Choose for rows in pieces, which all others aren't: a tile has them whole.

    Of many rows those that a power of two would pad are held in pieces. Some are read twice: they
    don't fit into registers, or had better stay out of them. Measured on an H200 for rms_norm of
    16384x8192 in bfloat16: 129 us with 16 bytes a thread in pieces of 8 KB, where a program that
    holds no row leaves registers for more of them, 146 with 32 bytes in pieces of 16 KB, and 134
    and more with smaller pieces or with whole rows. Rows of 8 KB are held in four pieces for what
    quantizes them at once: 53.2 against 58.0 us for rms_norm_quant_fp8 of 16384x4096, which a copy
    of as many bytes takes 52.1 for, and 70.2 against 70.9 for rms_norm. Those of 32 KB are held in
    eight: 55.8 against 60.7 us for 4096x16384 quantized, a copy 51.7, and 71.0 against 70.2.
    """
    size = columns * itemsize
    if INTERPRETED:
        held = 0 if center else held_pieces(columns, INTERPRETED_TILE, itemsize)
        return Walk(INTERPRETED_TILE, 32, held) if size > _LONGEST else None
    padded = columns != power_of_two(columns)
    block = even_piece(columns, itemsize) if crowded and padded and not center else 0
    if block:
        return Walk(block, block * itemsize // 16, columns // block)
    if size > _LONGEST:
        return Walk(_PIECE_BYTES // itemsize, 1024)
    pieces = {8192: 4, 32768: 8}.get(size, 0)
    if crowded and not center and pieces:
        return Walk(columns // pieces, 128, pieces)
    if crowded and not padded and not center and size >= 16384:
        return Walk(_SHORT_PIECE_BYTES // itemsize, _SHORT_PIECE_BYTES // 16)
    return None


# x, residual, weight, bias; the output and, with a residual, the sum.
_Tensors = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor | None]


class _Once(NamedTuple):
    """The launch of a kernel whose programs take whole rows."""

    variant: Variant
    programs: int
    numbers: tuple[int, ...]
    lane: int

    def __call__(self, tensors: _Tensors, eps: float) -> None:
        self.variant(self.programs, tensors, (*self.numbers, eps))


class _Twice(NamedTuple):
    """The launches of two kernels whose programs take a piece of a row each."""

    stats: Variant
    apply: Variant
    programs: int
    stats_numbers: tuple[int, ...]
    apply_numbers: tuple[int, ...]
    wide: torch.dtype
    lane: int

    def __call__(self, tensors: _Tensors, eps: float) -> None:
        x, r, w, b, y, s = tensors
        partial = torch.empty((self.programs, 2), dtype=self.wide, device=x.device)
        self.stats(self.programs, (x, r, s, partial), self.stats_numbers)
        v = x if s is None else s
        self.apply(self.programs, (v, w, b, y, partial), (*self.apply_numbers, eps))


_Launch = _Once | _Twice
_ways: dict[Any, Callable[[Rows], _Launch]] = {}
_launches: dict[Any, _Launch] = {}


def normalize(x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, style: Style) -> Tensor:
    """Normalize rows, scale by w and shift by b, vectors of any dtype or None."""
    y = torch.empty_like(x, memory_format=_CONTIGUOUS)
    _run(x, None, w, b, y, None, eps, style)
    return y


def add_normalize(
    x: Tensor, r: Tensor, w: Tensor, eps: float, style: Style = RMS
) -> tuple[Tensor, Tensor]:
    """Give the normalized rows of the rounded sum x + r, and that sum."""
    y = torch.empty_like(x, memory_format=_CONTIGUOUS)
    s = torch.empty_like(x, memory_format=_CONTIGUOUS)
    _run(x, r, w, None, y, s, eps, style)
    return y, s


def add_normalize_in_place(x: Tensor, r: Tensor, w: Tensor, eps: float) -> None:
    """Write the sum over r and the normalized rows over x."""
    _run(x, r, w, None, x, r, eps, _IN_PLACE)


def _run(
    x: Tensor,
    r: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    y: Tensor,
    s: Tensor | None,
    eps: float,
    style: Style,
) -> None:
    """Repeat a launch that was made for such arguments, or find out which to make."""
    key = (
        x.dtype, x.shape, x.stride(), None if r is None else r.stride(),
        None if w is None else (w.dtype, w.stride()), None if b is None else (b.dtype, b.stride()),
        style, x.get_device(),
    )  # fmt: skip
    known = _launches.get(key)
    if known is not None and (known.lane == 1 or _aligned(x, r, w, b)):
        known((x, r, w, b, y, s), eps)
    elif x.numel():
        made = _find(x, r, w, b, y, s, eps, style)
        if made is not None:
            remember(_launches, key, made)


def _aligned(x: Tensor, r: Tensor | None, w: Tensor | None, b: Tensor | None) -> bool:
    address = x.data_ptr()
    if r is not None:
        address |= r.data_ptr()
    if w is not None:
        address |= w.data_ptr()
    if b is not None:
        address |= b.data_ptr()
    return address % 16 == 0


def _find(
    x: Tensor,
    r: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    y: Tensor,
    s: Tensor | None,
    eps: float,
    style: Style,
) -> _Launch | None:
    """Copy what no kernel walks, launch, and give the launch if it can be repeated."""
    tensors = (x,) if r is None else (x, r)
    rows = as_rows(tensors, lane_of(x.shape[-1], x.element_size()))
    vectors = as_vector(w, rows.lane), as_vector(b, rows.lane)
    key = (
        x.dtype, rows.lanes, rows.lane, rows.total > _CROWD, rows.total > FEW, rows.inner > 0,
        r is None, *(None if vector is None else vector.dtype for vector in vectors),
        style, x.get_device(),
    )  # fmt: skip
    way = _ways.get(key)
    if way is None:
        way = _ways.setdefault(key, _choose(rows, style))
    if style.in_place:
        y, s = rows.tensors
    launch = way(rows)
    launch((rows.tensors[0], None if r is None else rows.tensors[1], *vectors, y, s), eps)
    pairs = list(zip((*rows.tensors, *vectors), (*tensors, w, b), strict=True))
    if style.in_place:
        for walked, given in pairs[:2]:
            if walked is not given and walked is not None and given is not None:
                given.copy_(walked)
    return launch if all(walked is given for walked, given in pairs) else None


def _choose(rows: Rows, style: Style) -> Callable[[Rows], _Launch]:
    x = rows.tensors[0]
    itemsize, device, aligned = x.element_size(), x.get_device(), rows.lane > 1
    columns = rows.lanes * rows.lane
    flags = (*style, rows.inner > 0, rows.lane)
    crowded = rows.total > _CROWD
    pieces = walk(columns, itemsize, crowded, style.center)
    if pieces is None:
        block = power_of_two(columns)
        chosen = config(block, columns, itemsize, crowded, style.center)
        constants = (*flags, block, chosen.rows, chosen.late, chosen.rows == 1 and block == columns)
        variant = kernels.whole.variant(constants, chosen.threads, device, aligned=aligned)
        return functools.partial(_whole_rows, variant, chosen.rows)
    if rows.total <= FEW:
        return _pieces_of_rows(rows, style)
    if pieces.held:
        holding = (*flags[1:], pieces.block, pieces.held)
        variant = kernels.held.variant(holding, pieces.threads, device, aligned=aligned)
        return functools.partial(_whole_rows, variant, 1)
    looping = (*flags, pieces.block, columns % pieces.block == 0)
    variant = kernels.looped.variant(looping, pieces.threads, device, aligned=aligned)
    return functools.partial(_whole_rows, variant, 1)


def _whole_rows(variant: Variant, each: int, rows: Rows) -> _Once:
    steps = (rows.step[0], rows.outer[0], rows.step[-1], rows.outer[-1])
    numbers = (rows.total, rows.lanes, *steps, rows.inner)
    return _Once(variant, -(-rows.total // each), numbers, rows.lane)


def _pieces_of_rows(rows: Rows, style: Style) -> Callable[[Rows], _Twice]:
    x, nested, lane = rows.tensors[0], rows.inner > 0, rows.lane
    pieces = -(-rows.lanes * lane // _PIECE)
    threads = min(max(_PIECE // 8, 32), 1024)
    constants: tuple[Any, ...] = (style.center, style.in_place, nested, lane, _PIECE)
    stats = kernels.stats.variant(constants, threads, x.get_device(), aligned=lane > 1)
    constants = (style.center, style.one_plus, nested, lane, _PIECE, power_of_two(pieces))
    apply = kernels.apply.variant(constants, threads, x.get_device(), aligned=lane > 1)
    wide = accumulation_dtype(x.dtype)

    def describe(rows: Rows) -> _Twice:
        x_at, r_at = (rows.step[0], rows.outer[0]), (rows.step[-1], rows.outer[-1])
        packed = (rows.lanes, rows.lanes * rows.inner)
        residual = len(rows.tensors) > 1
        v_at = (r_at if style.in_place else packed) if residual else x_at
        y_at = x_at if style.in_place else packed
        first = (rows.lanes, pieces, *x_at, *r_at, rows.inner)
        second = (rows.lanes, pieces, *v_at, *y_at, rows.inner)
        return _Twice(stats, apply, rows.total * pieces, first, second, wide, lane)

    return describe
