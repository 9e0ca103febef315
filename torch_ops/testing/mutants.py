"""Runs planted faults: a law that lets one pass proves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch_ops.testing.compare import ViolationError
from torch_ops.testing.draw import FLOATS
from torch_ops.testing.examine import Examiner, Tally
from torch_ops.testing.laws import GENERIC
from torch_ops.testing.proof import Mutant, Proof
from torch_ops.testing.search import covering_rows, drawn
from torch_ops.testing.spec import Spec
from torch_ops.testing.subject import mutating, subject_of

MIN_MUTANTS = 3


@dataclass(frozen=True)
class Fall:
    """At which example a mutant fell, and to which layer."""

    op: str
    mutant: str
    layer: str
    example: int
    spec: Spec
    detail: str


def stream(proof: Proof, layer: str, profile: str) -> Iterator[Spec]:
    """The examples that a profile runs for a layer, over all dtypes, in order."""
    if layer == "zero":
        for dtype in FLOATS:
            yield from proof.zero(dtype)
        return
    yield from covering_rows(proof.op, FLOATS)
    for dtype in FLOATS:
        yield from drawn(proof.op, dtype, profile)


def fall(
    proof: Proof, mutant: Mutant, layer: str, contract: Any, profile: str = "torch_ops_ci"
) -> Fall | None:
    """Finds the first example at which one layer alone finds a mutant wrong; None if it doesn't."""
    convert = proof.mutates and not mutant.in_place
    function = mutating(mutant.function, proof) if convert else mutant.function
    only = {"contract", "bound"} if layer == "zero" else {layer}
    examiner = Examiner(subject_of(function, mutant.name), proof, contract, only=only)
    for index, spec in enumerate(stream(proof, layer, profile), start=1):
        try:
            examiner(spec, Tally(), with_laws=layer not in {"zero", "bound", "contract"})
        except ViolationError as broken:
            if broken.layer in only:
                return Fall(proof.op, mutant.name, layer, index, spec, broken.detail)
    return None


def layers(proof: Proof, contract: Any) -> list[str]:
    """Every layer that has to kill mutants: the laws that bind, and what is no law."""
    laws = (law.name for law in (*GENERIC, *proof.laws) if law.binds(contract))
    return ["bound", "contract", "zero", *laws]
