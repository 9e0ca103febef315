"""Normalizes rows by one of three ways, chosen by the shape alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops.declarations._shared import accumulation_dtype

from . import _norm_kernels as kernels
from ._launch import INTERPRETED, INTERPRETED_TILE, Launch, Variant, multiprocessors, remember
from ._rows import Rows, as_rows, as_vector, lane_of, power_of_two

__all__ = ["LAYER", "ONE_PLUS", "RMS", "add_normalize", "add_normalize_in_place", "normalize"]

_CROWD = 512
_LONGEST = 32768  # bytes of a row that stays in registers
_FEW = 8
_PIECE = 4096
_NO_LIMIT = 2**31 - 1  # of a grid's first axis
_CONTIGUOUS = torch.contiguous_format


class Config(NamedTuple):
    """How a kernel walks rows that fit into registers.

    Attributes:
        rows: Rows of one tile.
        threads: Threads of one program.
        resident: Programs for each multiprocessor, which walk all tiles; 0: a program per tile.
        stages: Tiles in flight in a program that walks.
        late: Load weight and bias after the row was reduced, for more rows at once.
        keep: Eviction policy of weight and bias.
    """

    rows: int
    threads: int
    resident: int = 0
    stages: int = 1
    late: bool = False
    keep: str = ""


class Loop(NamedTuple):
    """How a kernel walks a row in pieces.

    Attributes:
        block: Elements of a piece.
        threads: Threads of one program.
        keep, drop: Eviction policies of the row when it is read first and again.
    """

    block: int
    threads: int
    keep: str = ""
    drop: str = ""


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


def config(block: int, itemsize: int, crowded: bool) -> Config:
    """Choose by the padded length of a row, and by whether there are more rows than `_CROWD`."""
    size = block * itemsize
    if INTERPRETED:
        return Config(rows=max(1, INTERPRETED_TILE // block), threads=32)
    if not crowded:
        return Config(rows=1, threads=min(max(size // 32, 64), 1024))
    rows = max(1, 2048 // size)
    return Config(rows, threads=min(max(size // 64, 64), 1024), late=True)


def loop(columns: int, itemsize: int) -> Loop:
    """Choose for rows that don't fit into registers."""
    if INTERPRETED:
        return Loop(INTERPRETED_TILE, 32)
    return Loop(16384 // itemsize, 1024)


_Way = Callable[[Rows, Tensor | None, Tensor | None, Tensor, Tensor | None, float], Launch | None]
_ways: dict[Any, _Way] = {}
_launches: dict[Any, Launch] = {}


def normalize(x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, style: Style) -> Tensor:
    """Normalize rows, scale by w and shift by b, vectors of any dtype or None."""
    y = torch.empty_like(x, memory_format=_CONTIGUOUS)
    _run(x, None, w, b, y, None, eps, style)
    return y


def add_normalize(x: Tensor, r: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Give the normalized rows of the rounded sum x + r, and that sum."""
    y = torch.empty_like(x, memory_format=_CONTIGUOUS)
    s = torch.empty_like(x, memory_format=_CONTIGUOUS)
    _run(x, r, w, None, y, s, eps, RMS)
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
        known.variant(known.programs, (x, r, w, b, y, s), (*known.numbers, eps))
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
) -> Launch | None:
    """Copy what no kernel walks, launch, and give the launch if it can be repeated."""
    tensors = (x,) if r is None else (x, r)
    rows = as_rows(tensors, lane_of(x.shape[-1], x.element_size()))
    vectors = as_vector(w, rows.lane), as_vector(b, rows.lane)
    key = (
        x.dtype, rows.lanes, rows.lane, rows.total > _CROWD, rows.total > _FEW, rows.inner > 0,
        r is None, *(None if vector is None else vector.dtype for vector in vectors),
        style, x.get_device(),
    )  # fmt: skip
    way = _ways.get(key)
    if way is None:
        way = _ways.setdefault(key, _choose(rows, style))
    if style.in_place:
        y, s = rows.tensors
    made = way(rows, *vectors, y, s, eps)
    pairs = list(zip((*rows.tensors, *vectors), (*tensors, w, b), strict=True))
    if style.in_place:
        for walked, given in pairs[:2]:
            if walked is not given and walked is not None and given is not None:
                given.copy_(walked)
    return made if all(walked is given for walked, given in pairs) else None


def _choose(rows: Rows, style: Style) -> _Way:
    x = rows.tensors[0]
    itemsize, device, aligned = x.element_size(), x.get_device(), rows.lane > 1
    columns = rows.lanes * rows.lane
    flags = (*style, rows.inner > 0, rows.lane)
    if columns * itemsize <= _LONGEST:
        block = power_of_two(columns)
        chosen = config(block, itemsize, rows.total > _CROWD)
        constants = (*flags, block, chosen.rows, chosen.stages, chosen.late, chosen.keep)
        variant = kernels.whole.variant(constants, chosen.threads, device, aligned=aligned)
        walking = multiprocessors(device) * chosen.resident
        return _Rowwise(variant, chosen.rows, walking or _NO_LIMIT)
    if rows.total <= _FEW:
        return _Split(rows, style)
    walk = loop(columns, itemsize)
    looping = (*flags, walk.block, walk.keep, walk.drop)
    variant = kernels.looped.variant(looping, walk.threads, device, aligned=aligned)
    return _Rowwise(variant, 1, _NO_LIMIT)


class _Rowwise:
    """A kernel whose programs take whole rows."""

    def __init__(self, variant: Variant, rows: int, limit: int) -> None:
        self._variant, self._rows, self._limit = variant, rows, limit

    def __call__(
        self,
        rows: Rows,
        w: Tensor | None,
        b: Tensor | None,
        y: Tensor,
        s: Tensor | None,
        eps: float,
    ) -> Launch:
        x, r = rows.tensors[0], None if s is None else rows.tensors[1]
        steps = (rows.step[0], rows.outer[0], rows.step[-1], rows.outer[-1])
        numbers = (rows.total, rows.lanes, *steps, rows.inner)
        programs = min(-(-rows.total // self._rows), self._limit)
        self._variant(programs, (x, r, w, b, y, s), (*numbers, eps))
        return Launch(self._variant, programs, numbers, rows.lane)


class _Split:
    """Two kernels, whose programs take a piece of a row each."""

    def __init__(self, rows: Rows, style: Style) -> None:
        device, aligned, nested = rows.tensors[0].get_device(), rows.lane > 1, rows.inner > 0
        self._pieces = -(-rows.lanes * rows.lane // _PIECE)
        threads = min(max(_PIECE // 8, 32), 1024)
        constants: tuple[Any, ...] = (style.center, style.in_place, nested, rows.lane, _PIECE)
        self._stats = kernels.stats.variant(constants, threads, device, aligned=aligned)
        constants = (style.center, style.one_plus, nested, rows.lane, _PIECE)
        constants = (*constants, power_of_two(self._pieces))
        self._apply = kernels.apply.variant(constants, threads, device, aligned=aligned)
        self._in_place = style.in_place
        self._wide = accumulation_dtype(rows.tensors[0].dtype)

    def __call__(
        self,
        rows: Rows,
        w: Tensor | None,
        b: Tensor | None,
        y: Tensor,
        s: Tensor | None,
        eps: float,
    ) -> None:
        x, r = rows.tensors[0], None if s is None else rows.tensors[1]
        x_at, r_at = (rows.step[0], rows.outer[0]), (rows.step[-1], rows.outer[-1])
        packed = (rows.lanes, rows.lanes * rows.inner)
        programs = rows.total * self._pieces
        partial = torch.empty(programs, 2, dtype=self._wide, device=x.device)
        numbers = (rows.lanes, self._pieces, *x_at, *r_at, rows.inner)
        self._stats(programs, (x, r, s, partial), numbers)
        v, v_at = (x, x_at) if s is None else (s, r_at if self._in_place else packed)
        y_at = x_at if self._in_place else packed
        numbers = (rows.lanes, self._pieces, *v_at, *y_at, rows.inner)
        self._apply(programs, (v, w, b, y, partial), (*numbers, eps))
