"""Planted faults of rotating and appending at once: those of both ops, and of what joins them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.faults import mutating_mutants
from torch_ops.testing.proof import Mutant
from torch_ops.testing.proofs._append_faults import MUTANTS as APPEND
from torch_ops.testing.proofs._append_faults import append
from torch_ops.testing.proofs._rope_append_laws import APPENDED, LAWS, ROTATED
from torch_ops.testing.proofs._rope_faults import mutants as rope_mutants
from torch_ops.testing.proofs._rope_faults import rope

WRITTEN = {*APPENDED, "order", "in_parts"}
Three = tuple[Tensor, Tensor, Tensor]
Two = tuple[Tensor, Tensor]


def both(
    turn: Callable[..., Two] | None = None,
    write: Callable[..., Two] | None = None,
    keys: Callable[[Tensor], Tensor] = lambda rotated: rotated,
    queries: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda rotated, q, slots: rotated,
    places: Callable[[Tensor, Tensor], Tensor] = lambda positions, slots: positions,
) -> Callable[..., Three]:
    """Returns the rotated queries and the new caches, made of these pieces."""
    rotate, put = turn or rope(), write or append()

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, cos_sin_cache: Tensor, positions: Tensor, k_cache: Tensor,
        v_cache: Tensor, slots: Tensor, is_neox: bool = True,
    ) -> Three:  # fmt: skip
        at = places(positions, slots)
        rotated_q, rotated_k = rotate(q, k, cos_sin_cache, at, is_neox)
        caches = put(keys(rotated_k), v, k_cache, v_cache, slots)
        return queries(rotated_q, q, slots), *caches

    return kernel


def _only_queries(q: Tensor, k: Tensor, *rest: Any) -> Two:
    return rope()(q, k, *rest)[0], k


def _twice(q: Tensor, k: Tensor, *rest: Any) -> Two:
    rotated_q, rotated_k = rope()(q, k, *rest)
    return rotated_q, rope()(q, rotated_k, *rest)[1]


def _by_differences(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> Two:
    """Other arithmetic: as right, but not the same bits."""
    return (a - b) * cos + b * (cos - sin), (b - a) * cos + a * (cos + sin)


def _keys_by_differences(q: Tensor, k: Tensor, *rest: Any) -> Two:
    return rope()(q, k, *rest)[0], rope(turn=_by_differences)(q, k, *rest)[1]


def _one_by_differences(q: Tensor, k: Tensor, *rest: Any) -> Two:
    made: Two = (rope(turn=_by_differences) if len(q) == 1 else rope())(q, k, *rest)
    return made


def _only_with_slots(rotated: Tensor, q: Tensor, slots: Tensor) -> Tensor:
    return torch.where((slots >= 0).view(-1, 1, 1), rotated, q)


def _zero_without_slots(rotated: Tensor, q: Tensor, slots: Tensor) -> Tensor:
    return rotated.masked_fill((slots < 0).view(-1, 1, 1), 0)


def _until_a_slot_is_missing(rotated: Tensor, q: Tensor, slots: Tensor) -> Tensor:
    wanted = (slots >= 0).cumprod(0).bool()
    return torch.where(wanted.view(-1, 1, 1), rotated, q)


def _first_without_slot(positions: Tensor, slots: Tensor) -> Tensor:
    """Positions counted from those that have a slot."""
    return torch.where(slots >= 0, positions, positions * 0)


def _joined() -> tuple[Mutant, ...]:
    """Faults of what joins the two."""
    turned = ("bound", "two_ops", "keys_as_queries")
    return (
        Mutant("keys_not_rotated", turned, both(_only_queries)),
        Mutant("keys_rotated_twice", turned, both(_twice)),
        Mutant("keys_by_other_arithmetic", ("two_ops", "keys_as_queries"),
               both(_keys_by_differences)),
        Mutant("other_arithmetic", ("two_ops",), both(rope(turn=_by_differences))),
        Mutant("fast_path_for_one_token", ("in_parts",), both(_one_by_differences)),
        Mutant("keys_in_float8", turned,
               both(keys=lambda rotated: rotated.to(torch.float8_e5m2).to(rotated.dtype))),
        Mutant("queries_only_with_slots", ("bound", "two_ops", "slots_apart"),
               both(queries=_only_with_slots)),
        Mutant("queries_zero_without_slots", ("bound", "two_ops", "slots_apart"),
               both(queries=_zero_without_slots)),
        Mutant("queries_until_a_slot_is_missing", ("bound", "two_ops", "slots_apart", "in_parts"),
               both(queries=_until_a_slot_is_missing)),
        Mutant("positions_of_slots_alone", ("bound", "two_ops", "slots_apart"),
               both(places=_first_without_slot)),
    )  # fmt: skip


def _lent() -> tuple[Mutant, ...]:
    """Faults of one of the two ops, where a law of it is one of both."""
    known = {law.name for law in LAWS} | {"bound"}
    turned = [(m, both(turn=m.function)) for m in rope_mutants() if set(m.kills) & set(ROTATED)]
    written = [(m, both(write=m.function)) for m in APPEND if set(m.kills) & WRITTEN]
    return tuple(
        Mutant(mutant.name, tuple(name for name in mutant.kills if name in known), function)
        for mutant, function in (*turned, *written)
    )


MUTANTS = (*_joined(), *_lent(), *mutating_mutants(both(), (0, 5, 6)))
