"""Planted faults of page tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.proof import Arguments, Mutant
from torch_ops.testing.proofs._paged import pool_of
from torch_ops.testing.proofs._ragged import Form, Run
from torch_ops.testing.proofs._ragged_faults import Kernel, Where, planter

Slots = Callable[[Tensor, Tensor, Arguments], tuple[Tensor, Tensor]]


def _slots(change: Slots) -> Where:
    """Other slots for each token, inside the pool."""

    def where(args: Arguments, runs: list[Run]) -> list[Run]:
        return [replace(run, keys=change(run.keys[0], run.keys[1], args)) for run in runs]

    return where


def _size(args: Arguments) -> int:
    return pool_of(args)[1]


def _page_of_16_bits(page: Tensor, offset: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    return page % 2**16, offset


def _slot_of_16_bits(page: Tensor, offset: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    """A product that overflows: here one of 16 bits, as one of 32 does in a large pool."""
    slot = (page * _size(args) + offset) % 2**16
    return slot // _size(args), slot % _size(args)


def _side_by_side(page: Tensor, offset: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    """Pages behind the first one taken from where they would be without a table."""
    token = torch.arange(len(page))
    beside = page[:1] + token // _size(args)
    return beside % pool_of(args)[0], offset


def _sorted(page: Tensor, offset: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    return page.sort().values, offset


def _reversed(page: Tensor, offset: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    return page.flip(0), offset


def _pages_of_16(page: Tensor, offset: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    """Pages of 16 tokens, whatever their size."""
    token, firsts = torch.arange(len(page)), page[:: _size(args)]
    return firsts[(token // 16).clamp(max=max(len(firsts) - 1, 0))], token % 16 % _size(args)


def _one_page_more(page: Tensor, offset: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    """The end of the table's part taken for its last entry."""
    behind = (page[-1:] + 1) % pool_of(args)[0]
    return torch.cat([page, behind]), torch.cat([offset, torch.zeros_like(behind)])


def _four_pages(page: Tensor, offset: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    """A table of at most four pages."""
    return page[: 4 * _size(args)], offset[: 4 * _size(args)]


def _last_page(length: Callable[[Tensor, int], Tensor]) -> Callable[[Arguments], Arguments]:
    def change(args: Arguments) -> Arguments:
        used = args["kv_last_page_len"]
        return args | {"kv_last_page_len": length(used, _size(args)).to(used.dtype)}

    return change


def _tokens_without_pages(args: Arguments, runs: list[Run]) -> list[Run]:
    """A sequence without pages has the tokens of its last page all the same."""
    table, last = args["kv_indptr"].tolist(), args["kv_last_page_len"].tolist()
    found = []
    for b, run in enumerate(runs):
        keys = run.keys
        if table[b] == table[b + 1] and table[b] < table[-1]:
            offset = torch.arange(min(last[b], _size(args)))
            keys = args["kv_indices"][table[b]].long().expand(len(offset)), offset
        found.append(replace(run, keys=keys))
    return found


def of_pages(form: Form, convert: Callable[[Kernel], Any]) -> list[Mutant]:
    """Faults of page tables."""
    mutant = planter(form, convert)
    return [
        mutant("page_of_16_bits", "bound moved_pages", where=_slots(_page_of_16_bits)),
        mutant("slot_of_16_bits", "bound moved_pages", where=_slots(_slot_of_16_bits)),
        mutant("pages_side_by_side", "bound moved_pages", where=_slots(_side_by_side)),
        mutant("pages_sorted", "bound moved_pages", where=_slots(_sorted)),
        mutant("pages_reversed", "bound one_page", where=_slots(_reversed)),
        mutant("pages_of_16_tokens", "bound one_page", where=_slots(_pages_of_16)),
        mutant("four_pages", "bound one_page", where=_slots(_four_pages)),
        mutant("one_page_more", "bound unread", where=_slots(_one_page_more)),
        mutant("last_page_is_full", "bound unread",
               arguments=_last_page(torch.full_like)),
        mutant("last_page_one_more", "bound unread",
               arguments=_last_page(lambda n, size: (n + 1).clamp(max=size))),
        mutant("last_page_one_less", "bound",
               arguments=_last_page(lambda n, size: (n - 1).clamp(min=1))),
        mutant("tokens_without_pages", "bound unread", where=_tokens_without_pages),
    ]  # fmt: skip
