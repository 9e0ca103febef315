"""Planted faults of writing into a paged cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_ops.testing.faults import mutating_mutants
from torch_ops.testing.proof import Mutant

Two = tuple[Tensor, Tensor]
Places = tuple[Tensor, Tensor, Tensor]
Find = Callable[[Tensor, int, int], Places]
Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def slots_of(slot_mapping: Tensor, page_size: int) -> Places:
    """Page and offset of each row that has a slot, and which rows those are."""
    rows = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[rows]
    return slots // page_size, slots % page_size, rows


def _find(slots: Tensor, page_size: int, pages: int) -> Places:
    return slots_of(slots, page_size)


def _write(cache: Tensor, page: Tensor, offset: Tensor, rows: Tensor) -> None:
    cache[page, offset] = rows


def append(
    find: Find = _find,
    write: Write = _write,
    of_values: Callable[[Tensor, Tensor], Tensor] = lambda k, v: v,
) -> Callable[..., Two]:
    """Returns the new caches, made of these pieces."""

    def kernel(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Two:
        caches = k_cache.clone(), v_cache.clone()
        page, offset, rows = find(slots, k_cache.shape[1], k_cache.shape[0])
        values = of_values(k, v)
        if k_cache.shape[0]:
            write(caches[0], page, offset, k[rows])
            write(caches[1], page, offset, values[rows])
        return caches

    return kernel


def _moved(change: Callable[[Tensor, int], Tensor]) -> Find:
    """Other slots, inside the cache; `change` takes slots and how many there are."""

    def find(slots: Tensor, page_size: int, pages: int) -> Places:
        return slots_of(change(slots, pages * page_size), page_size)

    return find


def _next(slots: Tensor, count: int) -> Tensor:
    return torch.where(slots >= 0, (slots + 1) % max(count, 1), slots)


def _of_16_bits(slots: Tensor, count: int) -> Tensor:
    """An overflow: here of 16 bits, as one of 32 in a cache of more than 2^31 elements."""
    return torch.where(slots >= 0, slots % 2**16, slots)


def _counted(slots: Tensor, count: int) -> Tensor:
    """Slots that follow the first one."""
    following = (slots[:1] + torch.arange(len(slots))) % max(count, 1)
    return torch.where(slots >= 0, following, slots)


def _wrapped(slots: Tensor, count: int) -> Tensor:
    """A negative slot counts from the end."""
    return slots % count if count else slots


def _first(slots: Tensor, count: int) -> Tensor:
    return slots.clamp(min=0) if count else slots


def _absolute(slots: Tensor, count: int) -> Tensor:
    return slots.abs() % count if count else slots


def _until_skipped(slots: Tensor, page_size: int, pages: int) -> Places:
    """A skipped row taken for the end."""
    page, offset, rows = slots_of(slots, page_size)
    kept = rows == torch.arange(len(rows))
    return page[kept], offset[kept], rows[kept]


def _all_but_last(slots: Tensor, page_size: int, pages: int) -> Places:
    return slots_of(slots[:-1], page_size)


def _row_before(slots: Tensor, page_size: int, pages: int) -> Places:
    page, offset, rows = slots_of(slots, page_size)
    return page, offset, (rows - 1).clamp(min=0)


def _compacted(slots: Tensor, page_size: int, pages: int) -> Places:
    """Rows counted without those that are skipped."""
    page, offset, rows = slots_of(slots, page_size)
    return page, offset, torch.arange(len(rows))


def _pages_of_16(slots: Tensor, page_size: int, pages: int) -> Places:
    page, offset, rows = slots_of(slots, 16)
    return page % max(pages, 1), offset % page_size, rows


def _pages_inside(slots: Tensor, page_size: int, pages: int) -> Places:
    """Pages and offsets the other way round."""
    page, offset, rows = slots_of(slots, max(pages, 1))
    return offset, page % page_size, rows


def _page_cleared(cache: Tensor, page: Tensor, offset: Tensor, rows: Tensor) -> None:
    cache[page] = 0
    cache[page, offset] = rows


def _next_cleared(cache: Tensor, page: Tensor, offset: Tensor, rows: Tensor) -> None:
    """A vector store that is wider than the row."""
    cache[page, (offset + 1) % cache.shape[1]] = 0
    cache[page, offset] = rows


def _added(cache: Tensor, page: Tensor, offset: Tensor, rows: Tensor) -> None:
    cache[page, offset] += rows


def _rounded(cache: Tensor, page: Tensor, offset: Tensor, rows: Tensor) -> None:
    cache[page, offset] = rows.to(torch.float8_e5m2).to(rows.dtype)


def _nan_cleared(cache: Tensor, page: Tensor, offset: Tensor, rows: Tensor) -> None:
    """What the cache holds is cleaned on the way."""
    cache.nan_to_num_()
    cache[page, offset] = rows


MUTANTS = (
    Mutant("next_slot", ("bound", "read_back", "untouched"), append(_moved(_next))),
    Mutant("slot_of_16_bits", ("bound", "read_back", "untouched"), append(_moved(_of_16_bits))),
    Mutant("slots_counted", ("bound", "read_back", "order", "in_parts"), append(_moved(_counted))),
    Mutant("negative_from_the_end", ("bound", "untouched", "skipped"), append(_moved(_wrapped))),
    Mutant("negative_is_slot_0", ("bound", "untouched", "skipped"), append(_moved(_first))),
    Mutant("negative_as_positive", ("bound", "untouched", "skipped"), append(_moved(_absolute))),
    Mutant("skipped_row_ends_it", ("bound", "read_back", "order", "in_parts"),
           append(_until_skipped)),
    Mutant("last_row_lost", ("bound", "read_back", "order", "in_parts"), append(_all_but_last)),
    Mutant("row_before", ("bound", "read_back", "order", "in_parts"), append(_row_before)),
    Mutant("rows_without_the_skipped", ("bound", "read_back", "order"), append(_compacted)),
    Mutant("pages_of_16_tokens", ("bound", "read_back", "untouched"), append(_pages_of_16)),
    Mutant("pages_inside_offsets", ("bound", "read_back", "untouched"), append(_pages_inside)),
    Mutant("page_cleared", ("bound", "untouched", "in_parts"), append(write=_page_cleared)),
    Mutant("next_slot_cleared", ("bound", "untouched"), append(write=_next_cleared)),
    Mutant("added", ("bound", "read_back"), append(write=_added)),
    Mutant("rounded", ("bound", "read_back"), append(write=_rounded)),
    Mutant("cache_cleaned", ("bound", "untouched"), append(write=_nan_cleared)),
    Mutant("keys_for_values", ("bound", "read_back"),
           append(of_values=lambda k, v: k if k.shape == v.shape else v)),
    *mutating_mutants(append(), (2, 3)),
)  # fmt: skip
