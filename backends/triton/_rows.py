"""Tensors as rows: leading dimensions become one or two strides, without copying where possible."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ._launch import device_function

__all__ = [
    "Rows", "as_rows", "as_vector", "even_piece", "held_pieces", "lane_of", "offset", "pieces_of",
    "power_of_two", "tile_rows",
]  # fmt: skip

_BYTES = 16
_HELD_BYTES = 65536
_PIECE_BYTES = 1024, 8192
_PIECES = 9


class Rows(NamedTuple):
    """How a kernel finds the rows of several tensors of one shape.

    Row i of tensor t starts ``(i // inner) * outer[t] + (i % inner) * step[t]`` lanes after its
    first element, or ``i * step[t]`` where nothing is nested.

    Attributes:
        tensors: The tensors, or contiguous copies of those that a kernel can't walk.
        total: Number of rows.
        lanes: Length of a row in lanes.
        lane: Elements of a lane.
        inner: Rows of a group, 0 where nothing is nested.
        step: Stride of rows in lanes, one per tensor.
        outer: Stride of groups of rows in lanes, one per tensor.
    """

    tensors: tuple[Tensor, ...]
    total: int
    lanes: int
    lane: int
    inner: int
    step: tuple[int, ...]
    outer: tuple[int, ...]


@device_function
def offset(
    row: tl.tensor,
    step: tl.tensor,
    outer: tl.tensor,
    inner: tl.tensor,
    LANE: tl.constexpr,
    NESTED: tl.constexpr,
) -> tl.tensor:
    """Give where a row starts; the product tells the compiler that it is a multiple of LANE."""
    start = row * step
    if NESTED:
        start = row // inner * outer + row % inner * step
    return start * LANE


@device_function
def tile_rows(tile: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Give the rows of a tile: one as a scalar, so that elements need no addresses of 64 bits."""
    first = tile.to(tl.int64) * ROWS
    return first if ROWS == 1 else first + tl.arange(0, ROWS)[:, None]


@device_function
def pieces_of(at: tl.tensor, BLOCK: tl.constexpr, PIECES: tl.constexpr) -> tl.tuple:
    """Load a row in pieces, all of which are under way together."""
    parts: tl.tuple = ()
    for piece in tl.static_range(PIECES):
        parts += (tl.load(at + piece * BLOCK + tl.arange(0, BLOCK)),)
    return parts


def even_piece(columns: int, itemsize: int) -> int:
    """Give elements of a piece, a power of two, of which few make a row; 0 where it takes many."""
    least, most = (size // itemsize for size in _PIECE_BYTES)
    block = min(columns & -columns, most)
    return block if block >= least and held_pieces(columns, block, itemsize) else 0


def held_pieces(columns: int, block: int, itemsize: int) -> int:
    """Give how many pieces make a row, none of them padded; 0 where registers can't hold them."""
    pieces = columns // block if columns % block == 0 else 0
    return pieces if pieces <= _PIECES and columns * itemsize <= _HELD_BYTES else 0


def power_of_two(number: int) -> int:
    """Give the smallest power of two that isn't smaller."""
    return 1 << (number - 1).bit_length() if number > 1 else 1


def lane_of(columns: int, itemsize: int) -> int:
    """Give how many elements a thread accesses at once: 16 bytes, or one where rows don't fit.

    It depends on the shape alone, so that rows are reduced in one order whatever their strides.
    """
    elements = _BYTES // itemsize
    return elements if columns % elements == 0 else 1


def as_rows(tensors: tuple[Tensor, ...], lane: int) -> Rows:
    """See tensors of one shape and dtype as rows; copies those of which that is impossible.

    Args:
        tensors: ``[..., columns]``, not empty.
        lane: Elements of a lane, from `lane_of`; divides the number of columns.
    """
    columns = tensors[0].shape[-1]
    total, lanes = tensors[0].numel() // columns, columns // lane
    if all(tensor.is_contiguous() and _starts_aligned(tensor, lane) for tensor in tensors):
        packed = (lanes,) * len(tensors)
        return Rows(tensors, total, lanes, lane, 0, packed, packed)
    walks = [_walk(tensor, lane) for tensor in tensors]
    inner = max(0 if walk is None else walk[2] for walk in walks)
    found = []
    for tensor, walk in zip(tensors, walks, strict=True):
        if walk is None or walk[2] not in (0, inner):
            copied = tensor.clone(memory_format=torch.contiguous_format)
            found.append((copied, lanes, inner * lanes))
        else:
            step, outer, nested = walk
            found.append((tensor, step // lane, (outer if nested else inner * step) // lane))
    copies, steps, outers = zip(*found, strict=True)
    return Rows(copies, total, lanes, lane, inner, steps, outers)


def _starts_aligned(tensor: Tensor, lane: int) -> bool:
    return lane == 1 or tensor.data_ptr() % _BYTES == 0


def _walk(tensor: Tensor, lane: int) -> tuple[int, int, int] | None:
    """Give row stride, group stride and rows of a group, or None for a tensor to be copied."""
    *sizes, columns = tensor.shape
    *strides, last = tensor.stride()
    if (last != 1 and columns != 1) or not _starts_aligned(tensor, lane):
        return None
    levels: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if stride % lane:
            return None
        if levels and levels[-1][1] == size * stride:
            levels[-1] = (levels[-1][0] * size, stride)
        else:
            levels.append((size, stride))
    if len(levels) > 2:
        return None
    if len(levels) == 2:
        return levels[1][1], levels[0][1], levels[1][0]
    return (levels[0][1] if levels else 0), 0, 0


def as_vector(tensor: Tensor | None, lane: int) -> Tensor | None:
    """Give a vector as its elements side by side, at a multiple of 16 bytes where needed."""
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor if _starts_aligned(tensor, lane) else tensor.clone()
