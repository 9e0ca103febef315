"""Planted faults of kernels that promise batch invariance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.faults import Kernel, each, last_bits
from torch_ops.testing.proof import Mutant


def row_by_row(kernel: Kernel, places: Sequence[int]) -> Kernel:
    """The kernel called for each row of the arguments at these places, so that none counts them."""

    def call(*args: Any) -> Any:
        first = args[places[0]]
        if first.dim() < 2 or first.shape[0] < 2:
            return kernel(*args)
        results = []
        for i in range(first.shape[0]):
            row = {place: args[place][i : i + 1].clone() for place in places}
            results.append(kernel(*(row.get(place, arg) for place, arg in enumerate(args))))
        if isinstance(results[0], Tensor):
            return torch.cat(results)
        return tuple(torch.cat(parts) for parts in zip(*results, strict=True))

    return call


def _wants_several(place: int) -> Callable[..., str | None]:
    def supports(*args: Any) -> str | None:
        return "one row" if args[place].shape[0] == 1 else None

    return supports


def batch_mutants(kernel: Kernel, places: Sequence[int]) -> tuple[Mutant, ...]:
    """Faults of kernels that promise not to count rows: those of arguments at these places."""
    right = row_by_row(kernel, places)

    def few(limit: int) -> Kernel:
        def call(*args: Any) -> Any:
            result = right(*args)
            return each(result, last_bits) if args[places[0]].shape[0] <= limit else result

        return call

    def several(*args: Any) -> Any:
        return right(*args)

    several.supports = _wants_several(places[0])  # type: ignore[attr-defined]
    return (
        Mutant("fast_path_for_one_row", ("batch_invariance",), few(1)),
        Mutant("fast_path_for_few_rows", ("batch_invariance",), few(2)),
        Mutant("predicate_wants_several_rows", ("batch_invariance",), several),
    )
