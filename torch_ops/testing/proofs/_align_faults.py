"""A plain sort of assignments in pieces, each of which a planted fault replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.declarations._experts import capacity
from torch_ops.testing.faults import generic_mutants
from torch_ops.testing.proof import Mutant

Change = Callable[[Tensor], Tensor]


def _same(x: Tensor) -> Tensor:
    return x


def aligned(
    ids: Callable[[Tensor, int], Tensor] = lambda flat, experts: flat,
    order: Change = _same,
    blocks: Callable[[int, int], int] = lambda count, size: -(-count // size),
    padding: Callable[[int], int] = lambda number: number,
    tail: Callable[[int], int] = lambda number: number,
    unused: int = -1,
    owner: Callable[[int, int], int] = lambda expert, experts: expert,
    total: Callable[[int, int], int] = lambda used, count: used,
    size: Callable[[int], int] = lambda size: size,
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Returns a sort made of these pieces."""

    def kernel(given: Tensor, num_experts: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
        flat, block = given.reshape(-1), size(block_size)
        number = len(flat)
        room = capacity(number, num_experts, block)
        entries: list[int] = []
        owners: list[int] = []
        found, counted = ids(flat, num_experts), 0
        for expert in range(num_experts):
            mine = order((found == expert).nonzero().view(-1)).tolist()
            counted += len(mine)
            needed = blocks(len(mine), block)
            entries += mine + [padding(number)] * (needed * block - len(mine))
            owners += [owner(expert, num_experts)] * needed
        used = total(len(entries), counted)
        entries += [tail(number)] * (room - len(entries))
        owners += [unused] * (room // block - len(owners))
        made = (entries[:room], owners[: room // block], [used])
        return tuple(torch.tensor(part, dtype=torch.int32) for part in made)  # type: ignore[return-value]

    return kernel


def _mixed(given: Tensor, num_experts: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pads behind the last expert alone, so that blocks have several."""
    entries, owners, used = aligned()(given, num_experts, block_size)
    number = given.numel()
    packed = torch.cat([entries[entries < number], entries[entries == number]])
    return packed, owners, used


def _of_experts_before(
    given: Tensor, num_experts: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    entries, owners, used = aligned()(given, num_experts, block_size)
    return entries, owners.roll(1), used


def _first_token_alone(
    given: Tensor, num_experts: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    entries, owners, used = aligned()(given, num_experts, block_size)
    return entries.masked_fill(entries >= max(given.shape[1], 1), given.numel()), owners, used


def _tokens_of_assignments(
    given: Tensor, num_experts: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    entries, owners, used = aligned()(given, num_experts, block_size)
    tokens = entries // max(given.shape[1], 1)
    return torch.where(entries < given.numel(), tokens, entries), owners, used


def _mutant(name: str, *kills: str, **pieces: Any) -> Mutant:
    return Mutant(name, kills, aligned(**pieces))


MUTANTS = (
    Mutant("first_token_alone", ("every_assignment", "bound"), _first_token_alone),
    Mutant("tokens_of_assignments", ("every_assignment", "bound"), _tokens_of_assignments),
    _mutant("last_expert_left_out", "every_assignment", "count", "bound",
            ids=lambda flat, experts: flat.masked_fill(flat == experts - 1, -1)),
    _mutant("first_is_left_out", "every_assignment", "bound", order=lambda mine: mine[1:]),
    Mutant("blocks_of_several_experts", ("one_expert", "bound"), _mixed),
    Mutant("experts_of_blocks_before", ("one_expert", "bound"), _of_experts_before),
    _mutant("experts_reversed", "one_expert", "bound", owner=lambda expert, all: all - 1 - expert),
    _mutant("descending", "ascending", "block_of_one", "bound", order=lambda mine: mine.flip(0)),
    _mutant("rotated", "ascending", "block_of_one", "bound", order=lambda mine: mine.roll(1)),
    _mutant("even_before_odd", "ascending", "block_of_one", "bound",
            order=lambda mine: torch.cat([mine[mine % 2 == 0], mine[mine % 2 == 1]])),
    _mutant("one_block_more", "count", "bound", blocks=lambda count, size: count // size + 1),
    _mutant("padding_not_counted", "count", "bound", total=lambda used, count: count),
    _mutant("total_one_less", "count", "bound", total=lambda used, count: max(used - 1, 0)),
    _mutant("padded_with_0", "padding", "bound", padding=lambda number: 0),
    _mutant("padded_with_minus_1", "padding", "bound", padding=lambda number: -1),
    _mutant("rest_is_0", "padding", "bound", tail=lambda number: 0),
    _mutant("unused_block_of_expert_0", "padding", "bound", unused=0),
    _mutant("negative_wraps", "left_out", "bound",
            ids=lambda flat, experts: torch.where(flat < 0, flat + experts, flat)),
    _mutant("negative_is_0", "left_out", "bound", ids=lambda flat, experts: flat.clamp(min=0)),
    _mutant("too_large_is_last", "left_out", "bound",
            ids=lambda flat, experts: flat.clamp(max=experts - 1)),
    _mutant("a_block_of_nothing", "zero", total=lambda used, count: used if count else 1),
    # The first output has one axis already.
    *(mutant for mutant in generic_mutants(aligned()) if mutant.name != "flat_for_empty"),
)  # fmt: skip
