"""A plain router in pieces, each of which a planted fault replaces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.arithmetic import compute_dtype
from torch_ops.testing.batch_faults import batch_mutants
from torch_ops.testing.faults import generic_mutants
from torch_ops.testing.proof import Mutant

Change = Callable[[Tensor], Tensor]
Order = Callable[[Tensor, int], Tensor]


def _nan_last(x: Tensor) -> Tensor:
    return x.masked_fill(x.isnan(), -math.inf)


def _lowest_first(ranked: Tensor, k: int) -> Tensor:
    return torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :k]


def _same(x: Tensor) -> Tensor:
    return x


def _divided(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def routed(
    logit: Change = _same,
    ranked: Change = _nan_last,
    order: Order = _lowest_first,
    softmax: Callable[[Tensor, Tensor], Tensor] = lambda x, ids: x.softmax(-1).gather(-1, ids),
    renormalized: Change = _divided,
    finish: Change = _same,
    ids: Callable[[Tensor, Tensor], Tensor] = lambda chosen, x: chosen,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a router made of these pieces."""

    def kernel(logits: Tensor, k: int, renormalize: bool = False) -> tuple[Tensor, Tensor]:
        x = logit(logits.contiguous().to(compute_dtype(logits.dtype)))
        chosen = order(ranked(x), k)
        weights = softmax(x, chosen)
        weights = finish(renormalized(weights) if renormalize else weights)
        return weights.float(), ids(chosen, x).int().contiguous()

    return kernel


def _highest_first(ranked: Tensor, k: int) -> Tensor:
    return ranked.shape[1] - 1 - _lowest_first(ranked.flip(-1), k)


def _middle_first(ranked: Tensor, k: int) -> Tensor:
    shift = ranked.shape[1] // 2
    return (_lowest_first(ranked.roll(shift, -1), k) - shift) % ranked.shape[1]


def _by_value(ranked: Tensor, k: int) -> Tensor:
    """Crosses out all experts of the largest logit at once; where none is left, 0 is found."""
    left, found = ranked.clone(), []
    for _ in range(k):
        best = left.argmax(-1, keepdim=True)
        found.append(best)
        left = left.masked_fill(left == left.gather(-1, best), -math.inf)
    return torch.cat(found, -1)


def _never_the_last(ranked: Tensor, k: int) -> Tensor:
    rest = ranked.clone()
    rest[:, -1] = -math.inf
    return _lowest_first(rest, k)


def _smallest(ranked: Tensor, k: int) -> Tensor:
    return torch.sort(ranked, dim=-1, stable=True).indices[:, :k]


def _last_two_swapped(ranked: Tensor, k: int) -> Tensor:
    chosen = _lowest_first(ranked, k)
    return torch.cat([chosen[:, :-2], chosen[:, -2:].flip(-1)], -1)


def _of_nan(value: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Other ids in rows with NaN."""
    return lambda chosen, x: torch.where(x.isnan().any(-1, keepdim=True), value(x), chosen)


def _of_chosen(x: Tensor, ids: Tensor) -> Tensor:
    return x.gather(-1, ids).softmax(-1)


def _without_largest(x: Tensor, ids: Tensor) -> Tensor:
    mass = x.exp()
    return mass.gather(-1, ids) / mass.sum(-1, keepdim=True)


def _less_for_more(x: Tensor, ids: Tensor) -> Tensor:
    return x.softmax(-1).gather(-1, ids) * (1 - ids.shape[1] * 2.0**-12)


def _last_takes_the_rest(x: Tensor, ids: Tensor) -> Tensor:
    weights = x.softmax(-1).gather(-1, ids)
    return torch.cat([weights[:, :-1], 1 - weights[:, :-1].sum(-1, keepdim=True)], -1)


def _rows_before(logits: Tensor, k: int, renormalize: bool = False) -> tuple[Tensor, Tensor]:
    weights, ids = routed()(logits, k, renormalize)
    return weights.roll(1, 0), ids


def _ids_before(logits: Tensor, k: int, renormalize: bool = False) -> tuple[Tensor, Tensor]:
    weights, ids = routed()(logits, k, renormalize)
    return weights, ids.roll(1, 0)


def _first_row(logits: Tensor, k: int, renormalize: bool = False) -> tuple[Tensor, Tensor]:
    return routed()(logits[:1].expand(logits.shape), k, renormalize)


def _mutant(name: str, *kills: str, **pieces: Any) -> Mutant:
    return Mutant(name, kills, routed(**pieces))


MUTANTS = (
    _mutant("highest_expert_first", "ties", "bound", order=_highest_first),
    _mutant("middle_expert_first", "ties", "bound", order=_middle_first),
    _mutant("equal_ones_crossed_out", "ties", "distinct", "bound", order=_by_value),
    _mutant("nan_first", "bound", ranked=lambda x: x.masked_fill(x.isnan(), math.inf)),
    _mutant("first_expert_for_nan", "distinct", ids=_of_nan(lambda x: torch.zeros_like(x[:, :1]))),
    _mutant("no_expert_for_nan", "distinct",
            ids=_of_nan(lambda x: torch.full_like(x[:, :1], x.shape[1]))),
    _mutant("nan_is_negative", "distinct", ids=_of_nan(lambda x: torch.full_like(x[:, :1], -1))),
    _mutant("nan_weighs_nothing", "bound", softmax=lambda x, ids: (
        _nan_last(x).softmax(-1).nan_to_num(0.0).gather(-1, ids))),
    _mutant("last_expert_never", "ranked", "bound", order=_never_the_last),
    _mutant("smallest", "ranked", "bound", order=_smallest),
    _mutant("last_two_swapped", "ranked", "fewer", "bound", order=_last_two_swapped),
    _mutant("logits_in_bfloat16", "ranked", "bound", ranked=lambda x: _nan_last(x).bfloat16()),
    _mutant("softmax_of_chosen", "fewer", "bound", softmax=_of_chosen),
    _mutant("less_for_more", "fewer", "bound", softmax=_less_for_more),
    _mutant("last_takes_the_rest", "fewer", "bound", softmax=_last_takes_the_rest),
    _mutant("largest_not_subtracted", "shift", "bound", softmax=_without_largest),
    _mutant("logits_clipped", "shift", "bound", logit=lambda x: x.clamp(max=3)),
    _mutant("soft_cap", "shift", "bound", logit=lambda x: 4 * torch.tanh(x / 4)),
    _mutant("no_negative_logits", "shift", "bound", logit=lambda x: x.clamp(min=0)),
    _mutant("not_renormalized", "renormalized", "bound", renormalized=_same),
    _mutant("divided_by_largest", "renormalized", "bound",
            renormalized=lambda w: w / w.amax(-1, keepdim=True)),
    _mutant("sum_has_an_epsilon", "renormalized", "bound",
            renormalized=lambda w: w / (w.sum(-1, keepdim=True) + 1e-3)),
    _mutant("weights_in_bfloat16", "renormalized", "bound", finish=lambda w: w.bfloat16()),
    Mutant("weights_of_row_before", ("row_permutation", "bound"), _rows_before),
    Mutant("ids_of_row_before", ("row_permutation", "bound"), _ids_before),
    Mutant("logits_of_row_0", ("row_permutation", "bound"), _first_row),
    *generic_mutants(routed()),
    *batch_mutants(routed(), (0,)),
)  # fmt: skip
