"""Keys and values in pages: which sequence a program serves, and how it reads a tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from ._launch import device_function

__all__ = [
    "LONGEST_WINDOW",
    "gathered",
    "id_count",
    "ids_of_tile",
    "lane_of_steps",
    "listed_pages",
    "owner",
    "pages_of_keys",
    "regular",
    "regular_pages",
    "rows_of",
    "steps_of",
]

LONGEST_WINDOW = 2**30  # places are 32 bits wide, and may be negative
_BYTES = 16
_MOST_IDS = 8  # of a tile, that are loaded one by one


@device_function
def owner(
    slot: tl.tensor, indptr: tl.tensor, batch: tl.tensor, size: tl.tensor,
    EACH: tl.constexpr, BLOCK_B: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Give (sequence, its n-th slot): sequence b has slots from ``b + start[b] // size`` on.

    ``start`` is EACH times ``indptr``. These are enough for pieces of at most ``size``, and one for
    a sequence of nothing; no sum over earlier sequences is needed to find them.
    """
    found = 0
    for first in range(0, batch, BLOCK_B):
        sequence = first + tl.arange(0, BLOCK_B)
        inside = sequence < batch
        begin = tl.load(indptr + sequence, mask=inside, other=0)
        reached = begin.to(tl.int64) * EACH < (slot - sequence + 1).to(tl.int64) * size
        found += tl.sum((inside & reached).to(tl.int32), 0)
    sequence = tl.maximum(found - 1, 0)
    start = tl.load(indptr + sequence).to(tl.int64) * EACH
    return sequence, slot - sequence - (start // size).to(tl.int32)


@device_function
def listed_pages(
    sequence: tl.tensor, kv_indptr: tl.tensor, kv_last_page_len: tl.tensor, listed: tl.tensor,
    PAGE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Give where a sequence's page ids start, how many there are, and the number of its keys."""
    begin = tl.maximum(tl.load(kv_indptr + sequence), 0)
    pages = tl.maximum(tl.minimum(tl.load(kv_indptr + sequence + 1), listed) - begin, 0)
    last = tl.minimum(tl.load(kv_last_page_len + sequence), PAGE)
    return begin, pages, tl.maximum((pages - 1) * PAGE + last, 0)


@device_function
def ids_of_tile(
    ids: tl.tensor, start: tl.tensor, end: tl.tensor, PAGE: tl.constexpr, IDS: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Load the ids of a tile's pages one by one, 0 from key ``end`` on, a tile ahead of their use.

    A vector of them would be taken for the first load of a chain, which leaves half the stages to
    keys and values; so would anything that is computed of them before the next tile.
    """
    found = ()
    for number in tl.static_range(IDS):
        page = tl.load(ids + start // PAGE + number, mask=start + number * PAGE < end, other=0)
        found = found + (page,)  # type: ignore[assignment] # noqa: RUF005
    return found


@device_function
def pages_of_keys(
    found: tl.tuple, ids: tl.tensor, key: tl.tensor, start: tl.tensor, end: tl.tensor,
    total: tl.tensor, PAGE: tl.constexpr, IDS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Give the page of each key of a tile, one that exists, by what `ids_of_tile` found."""
    if PAGE == 0:
        page = key
    elif IDS == 0:
        page = tl.load(ids + key // PAGE, mask=key < end, other=0)
    else:
        page = key * 0 + found[0]
        for number in tl.static_range(1, IDS):
            page = tl.where((key - start) // PAGE == number, found[number], page)
    if PAGE > 0:
        page = tl.minimum(tl.maximum(page, 0), total - 1)
    return page


@device_function
def rows_of(
    key: tl.tensor, pages: tl.tensor, page: tl.tensor, row: tl.tensor,
    LANE: tl.constexpr, PAGE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Give where the rows of keys start, relative to a head of the first page or first key."""
    if PAGE == 0:
        rows = key.to(tl.int64) * (row * LANE)
    else:
        rows = pages.to(tl.int64) * (page * LANE) + (key % PAGE).to(tl.int64) * (row * LANE)
    return rows


@device_function
def gathered(
    source: tl.tensor, rows: tl.tensor, inside: tl.tensor, column: tl.tensor,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, LANE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load rows of keys or values, zeros in place of those that aren't inside."""
    columns = tl.arange(0, BLOCK_W)[None, :]
    mask = inside[:, None]
    if WIDTH != BLOCK_W:
        mask = mask & (columns < WIDTH)
    if LANE == 1:
        columns = columns * column
    return tl.load(source + rows[:, None] + columns, mask=mask, other=0.0)


def steps_of(shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]]) -> list[list[int]]:
    """Give the strides of tensors: 0 for dimensions of one element, 1 for such a last one."""
    return [
        [
            *(step if size > 1 else 0 for size, step in zip(shape[:-1], steps, strict=False)),
            steps[-1] if shape[-1] > 1 else 1,
        ]
        for shape, steps in zip(shapes, strides, strict=True)
    ]


def lane_of_steps(steps: Sequence[Sequence[int]], itemsize: int, aligned: bool) -> int:
    """Give how many elements are 16 bytes if all rows start at multiples of that, or else 1.

    Args:
        steps: Strides of tensors, from `steps_of`.
        itemsize: Bytes of an element.
        aligned: Whether all addresses are multiples of 16 bytes.
    """
    lane = _BYTES // itemsize
    if not aligned:
        return 1
    for *outer, last in steps:
        if last != 1 or any(step % lane for step in outer):
            return 1
    return lane


def id_count(block_n: int, page: int) -> int:
    """Give how many pages a tile has if they are few and whole, or it is a part of one; else 0."""
    if not page:
        return 0
    if page % block_n == 0:
        return 1
    return block_n // page if block_n % page == 0 and block_n // page <= _MOST_IDS else 0


def regular(t: Tensor) -> Tensor:
    """Copy a tensor whose rows don't start at multiples of 16 bytes, where a copy's rows do.

    Loaded element by element it would be summed in another order.
    """
    if _is_regular(t) or not _can_be_regular(t):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def regular_pages(k: Tensor, v: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `regular`, of the pages that are listed alone; gives keys, values and ids of pages."""
    if not (_can_be_regular(k) and _can_be_regular(v)) or (_is_regular(k) and _is_regular(v)):
        return k, v, indices
    listed = indices.clamp(0, k.shape[0] - 1)
    ids = torch.arange(listed.shape[0], dtype=torch.int32, device=indices.device)
    return k.index_select(0, listed), v.index_select(0, listed), ids


def _is_regular(t: Tensor) -> bool:
    steps = steps_of((t.shape,), (t.stride(),))
    return lane_of_steps(steps, t.element_size(), t.data_ptr() % _BYTES == 0) > 1


def _can_be_regular(t: Tensor) -> bool:
    return t.shape[-1] * t.element_size() % _BYTES == 0
