"""Gradients of norms: in one pass where registers hold a row, else in two."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops.declarations import _norm_gradients as shared
from torch_ops.declarations._shared import accumulation_dtype

from . import _norm_gradient_kernels as kernels
from ._launch import INTERPRETED, INTERPRETED_TILE, Variant, multiprocessors
from ._norms import LAYER, ONE_PLUS, RMS, Style
from ._rows import Rows, as_rows, as_vector, lane_of, power_of_two

__all__ = ["LAYER", "ONE_PLUS", "RMS", "gradients"]

_TILE = 32768  # bytes of rows, in the dtype that is computed in, that stay in registers
_LONGEST = _TILE
_PIECE = 1024
_EACH = 8  # elements of a thread: those of the next rows are under way, and sums are kept
_FOLDED = (128, 32)  # rows and columns of what programs found


class Config(NamedTuple):
    """How rows are cut into tiles.

    Attributes:
        block: Columns of a tile, a power of two.
        rows: Rows of a tile.
        threads: Threads of one program.
        pieces: Tiles side by side.
        programs: How many a multiprocessor gets: it holds one of 1024 threads.
    """

    block: int
    rows: int
    threads: int
    pieces: int
    programs: int


def config(columns: int, itemsize: int) -> Config:
    """Choose by the length of a row and the size of an element in the dtype that is computed in."""
    long = columns * itemsize > _LONGEST
    block = _PIECE if long else power_of_two(columns)
    tile = INTERPRETED_TILE if INTERPRETED else _TILE // itemsize
    rows = max(tile // block, 1)
    threads = 32 if INTERPRETED else max(rows * block // _EACH, 32)
    return Config(block, rows, threads, -(-columns // block), 2 if long else 1)


def gradients(
    x: Tensor,
    grad: Tensor,
    r: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    eps: float,
    style: Style,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradients of x, w and b from those of the result and of what was added, r."""
    dx = x.new_empty(x.shape)
    dw, db = shared.empty(w, x), shared.empty(b, x)
    if not x.numel():
        return dx, dw.zero_(), db.zero_()
    rows = as_rows((x, grad) if r is None else (x, grad, r), lane_of(x.shape[-1], x.element_size()))
    wide = accumulation_dtype(x.dtype)
    chosen = config(x.shape[-1], wide.itemsize)
    tiles = -(-rows.total // chosen.rows)
    most = max(chosen.programs * multiprocessors(x.get_device()) // chosen.pieces, 1)
    each = -(-tiles // most)
    shares = -(-tiles // each)
    planes = 2 if style.center else 1
    partial = None
    if w is not None or b is not None:
        partial = torch.empty((shares, planes, x.shape[-1]), dtype=wide, device=x.device)
    vector = as_vector(w, rows.lane)
    _differentiate(rows, vector, dx, partial, eps, style, chosen, (shares, each))
    if partial is not None:
        _fold(partial, None if w is None else dw, None if b is None else db)
    return dx, dw, db


def _differentiate(
    rows: Rows,
    w: Tensor | None,
    dx: Tensor,
    partial: Tensor | None,
    eps: float,
    style: Style,
    chosen: Config,
    work: tuple[int, int],
) -> None:
    x, grad, *rest = rows.tensors
    r = rest[0] if rest else None
    shares, each = work
    flags = (style.center, style.one_plus, rows.inner > 0, rows.lane)
    dtypes = (x.dtype, None if w is None else w.dtype, r is None, partial is None)
    known = (flags, chosen, dtypes, x.get_device())
    x_at, d_at, r_at = ((rows.step[i], rows.outer[i]) for i in (0, 1, -1))
    at = (*x_at, *d_at, *r_at, rows.inner)
    if chosen.pieces == 1:
        whole = _variant("whole_gradient", *known)
        numbers = (rows.total, each, rows.lanes, *at, eps)
        whole(shares, (x, grad, r, w, dx, partial), numbers)
        return
    s = torch.empty((rows.total, 4), dtype=accumulation_dtype(x.dtype), device=x.device)
    sums, apply = _variant("gradient_sums", *known), _variant("gradient_apply", *known)
    sums(rows.total, (x, grad, w, s), (rows.lanes, *x_at, *d_at, rows.inner, eps))
    numbers = (rows.total, each, rows.lanes, chosen.pieces, *at)
    apply(shares * chosen.pieces, (x, grad, r, w, s, dx, partial), numbers)


@functools.cache
def _variant(
    name: str, flags: tuple[Any, ...], chosen: Config, dtypes: tuple[Any, ...], device: int
) -> Variant:
    """Make a variant, for one dtype of each tensor; the sums of a row know no rows of a tile."""
    kernel = getattr(kernels, name)
    sizes: tuple[int, ...] = (chosen.block, chosen.rows)
    threads = chosen.threads
    if name == "gradient_sums":
        sizes, threads = (chosen.block,), max(chosen.block // _EACH, 32)
    made: Variant = kernel.variant((*flags, *sizes), threads, device, aligned=flags[-1] > 1)
    return made


def _fold(partial: Tensor, dw: Tensor | None, db: Tensor | None) -> None:
    shares, planes, columns = partial.shape
    kinds = tuple(None if vector is None else vector.dtype for vector in (dw, db))
    variant = _folding(partial.dtype, kinds, (planes, *_FOLDED[::-1]), partial.get_device())
    pieces = -(-columns // _FOLDED[1])
    variant(planes * pieces, (partial, dw, db), (shares, columns, pieces))


@functools.cache
def _folding(
    wide: torch.dtype,
    kinds: tuple[torch.dtype | None, ...],
    constants: tuple[int, ...],
    device: int,
) -> Variant:
    """Make a variant for one dtype of each tensor."""
    return kernels.fold.variant(constants, 256, device, aligned=False)
