"""Quantizes rows with a scale each, and tensors with one scale."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops.declarations._quantization import AMAX_FLOOR, largest

from . import _quantization_kernels as kernels
from ._launch import INTERPRETED, INTERPRETED_TILE, Launch, Variant, remember
from ._rows import Rows, as_rows, even_piece, held_pieces, lane_of, power_of_two

__all__ = ["BY_ROW", "Scales", "quantize", "quantize_groups", "quantize_rows", "quantize_tensor"]

_CROWD = 512
_LONGEST = 32768  # bytes of a row that may stay in registers
_SHORT = 16384  # bytes of a row that one tile holds where there are many
_PIECE = 8192  # elements
_PIECES = 512  # each program that encodes reads the sizes of all
_ALONE = 16384  # elements of a tensor that one program quantizes
_GROUP = 16  # elements of the smallest group that kernels of rows reduce


class Scales(NamedTuple):
    """What shares a scale: a row, neighbours in a row, or everything.

    Attributes:
        group: How many neighbours; 0 is the whole row.
        given: One scale for all.
    """

    group: int = 0
    given: Tensor | None = None

    @property
    def by_row(self) -> bool:
        """Whether each row has a scale."""
        return not self.group and self.given is None

    def fuse(self) -> bool:
        """Whether a kernel that has rows in registers can quantize them, too."""
        return not self.group or (self.group >= _GROUP and self.group == power_of_two(self.group))

    def empty(self, q: Tensor) -> Tensor:
        """Give empty scales of codes."""
        if self.given is not None:
            return q.new_empty(1, dtype=torch.float32)
        width = q.shape[-1] // self.group if self.group else 1
        return q.new_empty((*q.shape[:-1], width), dtype=torch.float32)

    def fill(self, s: Tensor, dtype: torch.dtype) -> None:
        """Set the scales of nothing: no codes, or rows of none."""
        if self.given is not None:
            s.copy_(self.given)
        elif s.numel():
            s.fill_(AMAX_FLOOR / largest(dtype))


BY_ROW = Scales()


class Config(NamedTuple):
    """How a kernel takes rows.

    Attributes:
        block: Elements of a tile's row, or of a piece of one row.
        rows: Rows of a tile.
        threads: Threads of one program.
        pieces: Pieces of a row, all of which registers hold; 1 where tiles do, or nothing does.
    """

    block: int
    rows: int
    threads: int
    pieces: int = 1


def config(columns: int, itemsize: int, crowded: bool) -> Config:
    """Choose by the length of a row, and by whether there are more rows than `_CROWD`.

    A thread's 16 bytes arrive soonest; where there are many rows 32 keep the memory busy. Of many
    rows, those that are long or that a power of two would pad are held in pieces.
    """
    block = power_of_two(columns)
    size = block * itemsize
    if INTERPRETED:
        block = min(block, INTERPRETED_TILE)
        pieces = held_pieces(columns, block, itemsize) or 1
        return Config(block, INTERPRETED_TILE // block, 32, pieces)
    piece = even_piece(columns, itemsize) if crowded else 0
    if piece and (columns < block or size > _SHORT):
        return Config(piece, 1, piece * itemsize // 16, columns // piece)
    if columns * itemsize > _LONGEST:
        return Config(_PIECE, 1, 1024)
    rows = max(1, (4096 if crowded else 512) // size)
    each = 32 if crowded else 16
    return Config(block, rows, min(max(rows * size // each, 32), 1024))


class _Plan(NamedTuple):
    variant: Variant
    rows: int


_plans: dict[Any, _Plan] = {}
_launches: dict[Any, Launch] = {}


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Give codes of the shape of ``[..., columns]``, and scales ``[..., 1]``."""
    q = x.new_empty(x.shape, dtype=dtype)
    s = BY_ROW.empty(q)
    key = (x.dtype, x.shape, x.stride(), dtype, x.get_device())
    known = _launches.get(key)
    if known is not None and (known.lane == 1 or x.data_ptr() % 16 == 0):
        known.variant(known.programs, (x, q, s), known.numbers)
    elif x.numel():
        made = _find(x, q, s)
        if made is not None:
            remember(_launches, key, made)
    else:
        BY_ROW.fill(s, dtype)
    return q, s


def quantize(x: Tensor, dtype: torch.dtype, scales: Scales) -> tuple[Tensor, Tensor]:
    """Give codes of the shape of x and their scales."""
    if scales.given is not None:
        return quantize_tensor(x, scales.given, dtype)
    return quantize_groups(x, scales.group, dtype) if scales.group else quantize_rows(x, dtype)


def quantize_groups(x: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Give codes of the shape of ``[..., columns]``, and scales ``[..., columns / size]``."""
    groups = x.shape[-1] // size
    q, s = quantize_rows(x.unflatten(-1, (groups, size)), dtype)
    return q.view(x.shape), s.view((*x.shape[:-1], groups))


def _find(x: Tensor, q: Tensor, s: Tensor) -> Launch | None:
    """Copy what the kernel can't walk, launch, and give the launch if it can be repeated."""
    columns = x.shape[-1]
    rows = as_rows((x,), lane_of(columns, x.element_size()))
    crowded = rows.total > _CROWD
    key = (x.dtype, columns, rows.lane, rows.inner > 0, crowded, q.dtype, x.get_device())
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.setdefault(key, _plan(rows, columns, crowded, q.dtype))
    programs = -(-rows.total // plan.rows)
    numbers = (rows.total, rows.lanes, rows.step[0], rows.outer[0], rows.inner)
    plan.variant(programs, (rows.tensors[0], q, s), numbers)
    return Launch(plan.variant, programs, numbers, rows.lane) if rows.tensors[0] is x else None


def _plan(rows: Rows, columns: int, crowded: bool, dtype: torch.dtype) -> _Plan:
    x = rows.tensors[0]
    chosen = config(columns, x.element_size(), crowded)
    flags = (largest(dtype), dtype == torch.int8, rows.inner > 0, rows.lane, chosen.block)
    taken = chosen.rows if chosen.block >= columns else 1
    function = kernels.whole if chosen.block >= columns else kernels.looped
    constants = (*flags, taken)
    if chosen.pieces > 1:
        function, constants = kernels.held, (*flags, chosen.pieces)
    variant = function.variant(constants, chosen.threads, x.get_device(), aligned=rows.lane > 1)
    return _Plan(variant, taken)


class _Steps(NamedTuple):
    sizes: Variant
    encoded: Variant


_steps: dict[Any, _Steps] = {}


def quantize_tensor(x: Tensor, given: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Give codes of the shape of x, and the one scale ``[1]``, given or computed."""
    elements = x.numel()
    if given is None and elements <= _ALONE:
        q, s = quantize_rows(x.reshape(1, elements), dtype)
        return q.view(x.shape), s.view(1)
    flat = x.contiguous()
    q, s = x.new_empty(x.shape, dtype=dtype), x.new_empty(1, dtype=torch.float32)
    if not elements:
        return (q, s) if given is None else (q, s.copy_(given))
    lane = lane_of(elements, x.element_size()) if flat.data_ptr() % 16 == 0 else 1
    key = (x.dtype, dtype, given is None, lane, x.get_device())
    steps = _steps.get(key)
    if steps is None:
        steps = _steps.setdefault(key, _make_steps(flat, dtype, lane))
    tiles = -(-elements // _PIECE)
    pieces, partial = min(tiles, _PIECES), None
    if given is None:
        partial = x.new_empty(pieces, dtype=torch.float32)
        steps.sizes(pieces, (flat, partial), (elements // lane, pieces))
    steps.encoded(tiles, (flat, q, s, partial, given), (elements // lane, pieces))
    return q, s


def _make_steps(x: Tensor, dtype: torch.dtype, lane: int) -> _Steps:
    threads, device = _PIECE * x.element_size() // 32, x.get_device()
    constants = (largest(dtype), dtype == torch.int8, lane, _PIECE, _PIECES)
    return _Steps(
        kernels.sizes.variant((lane, _PIECE), threads, device, aligned=lane > 1),
        kernels.encoded.variant(constants, threads, device, aligned=lane > 1),
    )
