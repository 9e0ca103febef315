"""Where Specs come from: the covering array, and hypothesis."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from torch_ops.declarations import catalogue
from torch_ops.testing._hypothesis import Phase, given, settings
from torch_ops.testing.covering import pairwise
from torch_ops.testing.draw import DTYPES
from torch_ops.testing.profiles import Profile, profile_of
from torch_ops.testing.proof import proof_of
from torch_ops.testing.spec import Spec


def dtypes_of(op: str) -> tuple[str, ...]:
    """Names of the dtypes that an op declares, in the order in which they are proven."""
    declared = catalogue()[op].dtypes
    return tuple(dtype for dtype in DTYPES if getattr(torch, dtype) in declared)


@functools.cache
def covering_rows(op: str, dtypes: tuple[str, ...]) -> tuple[Spec, ...]:
    """Specs in which every two choices of dtype, layout, regime, dims and parameters meet."""
    proof = proof_of(op)
    rows = pairwise({"dtype": dtypes, **proof.axes})
    specs = [
        proof.row(row["dtype"], {k: v for k, v in row.items() if k != "dtype"}) for row in rows
    ]
    return tuple(dict.fromkeys(specs))


def generate(
    op: str, dtype: str, profile: Profile, examine: Callable[[Spec], None], examples: int
) -> None:
    """Lets hypothesis draw Specs and shrink the first one for which `examine` raises."""
    strategy = proof_of(op).draw(dtype, profile.budget)

    @settings(parent=profile.settings, max_examples=examples)
    @given(strategy)
    def run(spec: Spec) -> None:
        examine(spec)

    run()


@functools.cache
def drawn(op: str, dtype: str, profile: str) -> tuple[Spec, ...]:
    """The Specs that a derandomized profile draws for an op and dtype, in order."""
    chosen = profile_of(profile)
    found: list[Spec] = []
    plain = Profile(chosen.name, settings(chosen.settings, phases=[Phase.generate]), chosen.budget)
    generate(op, dtype, plain, found.append, chosen.examples(proof_of(op).cost))
    return tuple(found)
