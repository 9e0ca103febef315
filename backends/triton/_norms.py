"""Normalizes rows by one of three ways, chosen by the shape alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops.declarations._shared import accumulation_dtype

from . import _norm_kernels as kernels
from ._launch import INTERPRETED, INTERPRETED_TILE, Variant, multiprocessors
from ._rows import Rows, as_rows, as_vector, lane_of, power_of_two

__all__ = ["LAYER", "ONE_PLUS", "RMS", "add_normalize", "add_normalize_in_place", "normalize"]

_CROWD = 512
_LONGEST = 32768  # bytes of a row that stays in registers
_FEW = 8
_PIECE = 2048
_STEP = 8192
_NO_LIMIT = 2**31 - 1  # of a grid's first axis


class Config(NamedTuple):
    """How a kernel walks rows that fit into registers.

    Attributes:
        rows: Rows of one tile.
        threads: Threads of one program.
        resident: Programs for each multiprocessor, which walk all tiles; 0: a program per tile.
        stages: Tiles in flight in a program that walks.
        load, store: Eviction policies of what is read and written once.
    """

    rows: int
    threads: int
    resident: int = 0
    stages: int = 1
    load: str = ""
    store: str = ""


class Style(NamedTuple):
    """What is computed.

    Attributes:
        center: Subtract the mean first.
        one_plus: Scale by one plus the weight.
    """

    center: bool = False
    one_plus: bool = False


RMS = Style()
LAYER = Style(center=True)
ONE_PLUS = Style(one_plus=True)

_Way = Callable[[Rows, Tensor | None, Tensor | None, Tensor, Tensor | None, float], None]
_ways: dict[Any, _Way] = {}


def config(block: int, itemsize: int, crowded: bool, padded: bool) -> Config:
    """Choose by the padded length of a row, and by whether there are more rows than `_CROWD`.

    Programs that stay and prefetch win for the longest rows and for padded ones (141 against 184 us
    for 8192x16384 bfloat16, 50 against 54 for 8192x5120, H200); elsewhere a program per tile does.
    """
    size = block * itemsize
    if INTERPRETED:
        return Config(rows=max(1, INTERPRETED_TILE // block), threads=32)
    if not crowded:
        return Config(rows=1, threads=min(max(size // 16, 32), 1024))
    if size >= 32768 or (size >= 16384 and padded):
        return Config(rows=1, threads=512, resident=2, stages=4, load="evict_first")
    rows = max(1, 2048 // size)
    return Config(rows, threads=min(max(size // 64, 64 if rows == 1 else 128), 512))


def normalize(x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, style: Style) -> Tensor:
    """Normalize rows, scale by w and shift by b, vectors of any dtype or None."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        rows = as_rows((x,), lane_of(x.shape[-1], x.element_size()))
        _run(rows, w, b, y, None, eps, style, False)
    return y


def add_normalize(x: Tensor, r: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Give the normalized rows of the rounded sum x + r, and that sum."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    s = torch.empty_like(y)
    if x.numel():
        rows = as_rows((x, r), lane_of(x.shape[-1], x.element_size()))
        _run(rows, w, None, y, s, eps, RMS, False)
    return y, s


def add_normalize_in_place(x: Tensor, r: Tensor, w: Tensor, eps: float) -> None:
    """Write the sum over r and the normalized rows over x."""
    if not x.numel():
        return
    rows = as_rows((x, r), lane_of(x.shape[-1], x.element_size()))
    y, s = rows.tensors
    _run(rows, w, None, y, s, eps, RMS, True)
    for written, tensor in ((y, x), (s, r)):
        if written is not tensor:
            tensor.copy_(written)


def _run(
    rows: Rows,
    w: Tensor | None,
    b: Tensor | None,
    y: Tensor,
    s: Tensor | None,
    eps: float,
    style: Style,
    in_place: bool,
) -> None:
    x = rows.tensors[0]
    w, b = as_vector(w, rows.lane), as_vector(b, rows.lane)
    key = (
        x.dtype, rows.lanes, rows.total > _CROWD, rows.total > _FEW, rows.inner > 0, s is None,
        None if w is None else w.dtype, None if b is None else b.dtype,
        style, in_place, rows.lane, x.get_device(),
    )  # fmt: skip
    way = _ways.get(key)
    if way is None:
        way = _ways.setdefault(key, _choose(rows, style, in_place))
    way(rows, w, b, y, s, eps)


def _choose(rows: Rows, style: Style, in_place: bool) -> _Way:
    x = rows.tensors[0]
    itemsize, device, aligned = x.element_size(), x.get_device(), rows.lane > 1
    columns = rows.lanes * rows.lane
    flags = (*style, in_place, rows.inner > 0, rows.lane)
    if columns * itemsize <= _LONGEST:
        block = power_of_two(columns)
        chosen = config(block, itemsize, rows.total > _CROWD, block > columns)
        constants = (*flags, block, chosen.rows, chosen.stages, chosen.load, chosen.store)
        variant = kernels.whole.variant(constants, chosen.threads, device, aligned=aligned)
        walking = multiprocessors(device) * chosen.resident
        return _Rowwise(variant, chosen.rows, walking or _NO_LIMIT)
    if rows.total <= _FEW:
        return _Split(rows, style, in_place, device)
    variant = kernels.looped.variant((*flags, _STEP), _STEP // 8, device, aligned=aligned)
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
    ) -> None:
        tensors, steps, outers = rows.tensors, rows.step, rows.outer
        self._variant(
            min(-(-rows.total // self._rows), self._limit),
            (tensors[0], tensors[1] if s is not None else None, w, b, y, s),
            (rows.total, rows.lanes, steps[0], outers[0], steps[-1], outers[-1], rows.inner, eps),
        )


class _Split:
    """Two kernels, whose programs take a piece of a row each."""

    def __init__(self, rows: Rows, style: Style, in_place: bool, device: int) -> None:
        columns = rows.lanes * rows.lane
        self._pieces = -(-columns // _PIECE)
        aligned, nested = rows.lane > 1, rows.inner > 0
        self._stats = kernels.stats.variant(
            (style.center, in_place, nested, rows.lane, _PIECE),
            _PIECE // 16,
            device,
            aligned=aligned,
        )
        self._apply = kernels.apply.variant(
            (*style, nested, rows.lane, _PIECE, power_of_two(self._pieces)),
            _PIECE // 16,
            device,
            aligned=aligned,
        )
        self._in_place = in_place
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
        x = rows.tensors[0]
        r = rows.tensors[1] if s is not None else None
        programs = rows.total * self._pieces
        partial = torch.empty(programs, 2, dtype=self._wide, device=x.device)
        x_at, r_at = (rows.step[0], rows.outer[0]), (rows.step[-1], rows.outer[-1])
        flat = (rows.lanes, rows.lanes * rows.inner)
        self._stats(
            programs,
            (x, r, s, partial),
            (rows.lanes, self._pieces, *x_at, *r_at, rows.inner),
        )
        v, v_at = (x, x_at) if s is None else (s, r_at if self._in_place else flat)
        y_at = x_at if self._in_place else flat
        self._apply(
            programs,
            (v, w, b, y, partial),
            (rows.lanes, self._pieces, *v_at, *y_at, rows.inner, eps),
        )
