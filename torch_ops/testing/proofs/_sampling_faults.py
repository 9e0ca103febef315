"""A plain filter of probabilities in pieces, each of which a planted fault replaces."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.batch_faults import batch_mutants
from torch_ops.testing.faults import generic_mutants
from torch_ops.testing.proof import Mutant


@dataclass(frozen=True)
class Seen:
    """A row as its filter sees it, in float64.

    Attributes:
        values: Probabilities, those that don't count 0.
        number: The argument, ``[B, 1]``.
        place: Each element's place, from the largest on.
        before: The mass of what comes before it.
    """

    values: Tensor
    number: Tensor
    place: Tensor
    before: Tensor

    @property
    def columns(self) -> int:
        """Length of a row."""
        return self.values.shape[-1]


Choice = Callable[[Seen], Tensor]


def by_index(values: Tensor) -> Tensor:
    """The order of a row: of equal ones the first comes first."""
    return values.sort(dim=-1, descending=True, stable=True).indices


def last_first(values: Tensor) -> Tensor:
    """Of equal ones the last comes first."""
    return values.shape[-1] - 1 - by_index(values.flip(-1))


def divided(seen: Seen, chosen: Tensor) -> Tensor:
    """What is chosen, by its sum."""
    values = torch.where(chosen, seen.values, 0.0)
    total = values.sum(-1, keepdim=True)
    return values / torch.where(total > 0, total, 1.0)


def plain(
    choose: Choice,
    active: Choice,
    order: Callable[[Tensor], Tensor] = by_index,
    finish: Callable[[Seen, Tensor], Tensor] = divided,
    clean: Callable[[Tensor], Tensor] = lambda x: torch.where(x.isfinite() & (x > 0), x, 0.0),
    unsound: float = math.nan,
    disabled: Callable[[Tensor], Tensor] = lambda x: x,
) -> Callable[..., Tensor]:
    """Returns a filter made of these pieces."""

    def kernel(probs: Tensor, number: Tensor) -> Tensor:
        probs = probs.contiguous()
        if not probs.numel():
            return torch.empty_like(probs)
        values = clean(probs).double()
        sequence = order(values)
        sorted_ = values.gather(-1, sequence)
        count = torch.arange(values.shape[-1]).expand(values.shape)
        back = torch.empty_like(sequence).scatter_(-1, sequence, count)
        before = (sorted_.cumsum(-1) - sorted_).gather(-1, back)
        seen = Seen(values, number.unsqueeze(-1).double(), back, before)
        result = finish(seen, choose(seen)).float()
        result = result.masked_fill(~probs.isfinite().all(-1, keepdim=True), unsound)
        return torch.where(active(seen), result, disabled(probs))

    return kernel


def over_row(seen: Seen, chosen: Tensor) -> Tensor:
    """Divided by the whole row's sum."""
    total = seen.values.sum(-1, keepdim=True)
    return torch.where(chosen, seen.values, 0.0) / torch.where(total > 0, total, 1.0)


def row_rounded(seen: Seen, chosen: Tensor) -> Tensor:
    """Divided by a sum that is a little of the whole row's."""
    kept = torch.where(chosen, seen.values, 0.0)
    rest = (seen.values.sum(-1, keepdim=True) - kept.sum(-1, keepdim=True)) * 2**-10
    return divided(seen, chosen) / (1 + rest)


def one_more_in_sum(seen: Seen, chosen: Tensor) -> Tensor:
    """Divided by a sum that has the largest of the others, too."""
    values = torch.where(chosen, seen.values, 0.0)
    others = torch.where(chosen, 0.0, seen.values).amax(-1, keepdim=True)
    total = values.sum(-1, keepdim=True) + others
    return values / torch.where(total > 0, total, 1.0)


def first_rows_sum(seen: Seen, chosen: Tensor) -> Tensor:
    """Divided by the sum of row 0."""
    values = torch.where(chosen, seen.values, 0.0)
    total = values[:1].sum(-1, keepdim=True)
    return values / torch.where(total > 0, total, 1.0)


def plus(constant: float) -> Callable[[Seen, Tensor], Tensor]:
    """Divided by a sum to which a constant is added."""

    def finish(seen: Seen, chosen: Tensor) -> Tensor:
        values = torch.where(chosen, seen.values, 0.0)
        return values / (values.sum(-1, keepdim=True) + constant)

    return finish


def small_dropped(limit: float) -> Callable[[Tensor], Tensor]:
    """Sets what is smaller to 0."""
    return lambda x: torch.where(x.isfinite() & (x > limit), x, 0.0)


def of_row_before(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Each row gets the number of the row before."""
    return lambda probs, *numbers: kernel(probs, *(n.roll(1, 0) for n in numbers))


def of_first_row(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """All rows get the number of the first."""
    return lambda probs, *numbers: kernel(probs, *(n[:1].expand(n.shape) for n in numbers))


def probs_of_row_before(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Each row is that of the row before."""
    return lambda probs, *numbers: kernel(probs.roll(1, 0), *numbers)


def rows_mixed(kernel: Callable[..., Any]) -> tuple[Mutant, ...]:
    """Faults of every filter that mix up rows, address wrongly or aren't deterministic."""
    killed = ("row_permutation", "bound")
    return (
        Mutant("number_of_row_before", killed, of_row_before(kernel)),
        Mutant("number_of_row_0", killed, of_first_row(kernel)),
        Mutant("row_before", killed, probs_of_row_before(kernel)),
        *generic_mutants(kernel),
        *batch_mutants(kernel, (0, 1)),
    )
