"""Runs planted faults: a law that lets one pass proves nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torch_ops.testing.compare import ViolationError
from torch_ops.testing.examine import Examiner, Tally
from torch_ops.testing.laws import GENERIC
from torch_ops.testing.proof import Mutant, Proof
from torch_ops.testing.search import covering_rows, drawn, dtypes_of
from torch_ops.testing.spec import Spec
from torch_ops.testing.subject import mutating, subject_of
from torch_ops.testing.values import REGIMES

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
        for dtype in dtypes_of(proof.op):
            yield from proof.zero(dtype)
        return
    yield from covering_rows(proof.op)
    for dtype in dtypes_of(proof.op):
        yield from drawn(proof.op, dtype, profile)


def fall(
    proof: Proof, mutant: Mutant, layer: str, contract: Any, profile: str = "torch_ops_ci"
) -> Fall | None:
    """Finds the first example at which one layer alone finds a mutant wrong; None if it doesn't."""
    alone = _alone(proof, mutant, layer, contract)
    for index, spec in enumerate(stream(proof, layer, profile), start=1):
        broken = alone(spec)
        if broken is not None:
            return Fall(proof.op, mutant.name, layer, index, spec, broken.detail)
    return None


Layer = Callable[[Spec], ViolationError | None]


def _alone(proof: Proof, mutant: Mutant, layer: str, contract: Any) -> Layer:
    """One layer as a function from an example to what it finds wrong with a mutant.

    A fault that draws random numbers draws the same ones for the same example.
    """
    convert = proof.mutates and not mutant.in_place
    function = mutating(mutant.function, proof) if convert else mutant.function
    only = {"contract", "bound"} if layer == "zero" else {layer}
    for law in (*GENERIC, *proof.laws):
        if law.name == layer and law.declared:  # a law about a promise is judged as if it was made
            contract = dataclasses.replace(contract, **{law.declared: True})
    examiner = Examiner(subject_of(function, mutant.name), proof, contract, only=only)

    def judge(spec: Spec) -> ViolationError | None:
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(0)  # torch.manual_seed keeps a stack
            try:
                examiner(spec, Tally(), with_laws=layer not in {"zero", "bound", "contract"})
            except ViolationError as broken:
                return broken if broken.layer in only else None
        return None

    return judge


def tells_apart(proof: Proof, mutant: Mutant, layer: str, declared: Any, spec: Spec) -> bool:
    """Whether a layer finds the mutant wrong and the reference right at one example.

    Args:
        proof: The op's proof.
        mutant: One of its mutants.
        layer: A layer that kills it.
        declared: The op's declaration.
        spec: The example.
    """
    if _alone(proof, mutant, layer, declared.contract)(spec) is None:
        return False
    reference = Mutant("reference", (layer,), declared.reference, in_place=True)
    return _alone(proof, reference, layer, declared.contract)(spec) is None


def shrink(spec: Spec, holds: Callable[[Spec], bool]) -> Spec:
    """Makes an example simpler, step by step, as long as something holds for it."""
    simpler = True
    while simpler:
        simpler = False
        for change in _changes(spec):
            candidate = change(spec)
            if candidate == spec or not _legal(holds, candidate):
                continue
            spec, simpler = candidate, True
    return spec


def _legal(holds: Callable[[Spec], bool], spec: Spec) -> bool:
    """Whether it holds; sizes that don't fit each other make no example."""
    try:
        return holds(spec)
    except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError):
        return False


def _changes(spec: Spec) -> Iterator[Callable[[Spec], Spec]]:
    """Smaller sizes, then plainer operands; each change is of one thing."""
    yield lambda s: s.replace(seed=0)
    for name, size in spec.dims:
        for smaller in sorted({1, 2, 3, size // 2, size - 1}):
            if 0 < smaller < size:
                yield functools.partial(_sized, name=name, size=smaller)
    for name, operand in spec.operands:
        yield functools.partial(_looking, name=name, changes={"layout": "contig"})
        yield functools.partial(_looking, name=name, changes={"specials": ()})
        if operand.regime in REGIMES:
            yield functools.partial(_looking, name=name, changes={"regime": "normal"})


def _sized(spec: Spec, name: str, size: int) -> Spec:
    return spec.replace(dims={**spec.dim, name: min(size, spec.dim[name])})


def _looking(spec: Spec, name: str, changes: dict[str, Any]) -> Spec:
    changed = dataclasses.replace(spec.operand[name], **changes)
    return spec.replace(operands={**spec.operand, name: changed})


def layers(proof: Proof) -> list[str]:
    """Every layer that has to kill mutants: the laws, and what is no law."""
    return ["bound", "contract", "zero", *(law.name for law in (*GENERIC, *proof.laws))]
