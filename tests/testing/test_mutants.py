"""Every planted fault is found by the layer that names it, and every layer finds at least three."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torch_ops.declarations import catalogue
from torch_ops.testing.mutants import MIN_MUTANTS, fall, layers, shrink, tells_apart
from torch_ops.testing.proof import proof_names, proof_of
from torch_ops.testing.spec import Operand, Spec

from .fixtures import mutants

EXACT_LAWS = 3
TABLE: list[dict[str, Any]] = json.loads(mutants.FILE.read_text())["mutants"]
CASES = [(op, layer) for op in proof_names() for layer in layers(proof_of(op))]


@pytest.mark.parametrize(("op", "layer"), CASES, ids=[f"{op}-{layer}" for op, layer in CASES])
def test_a_layer_finds_its_mutants(op: str, layer: str) -> None:
    proof, contract = proof_of(op), catalogue()[op].contract
    planted = [m for m in proof.mutants if layer in m.kills]
    survivors = [m.name for m in planted if fall(proof, m, layer, contract) is None]
    assert len(planted) >= MIN_MUTANTS
    assert not survivors, f"{op}: {layer} lets pass: {survivors}"


@pytest.mark.parametrize("op", proof_names())
def test_a_proof_has_laws_and_consistent_mutants(op: str) -> None:
    proof = proof_of(op)
    known = set(layers(proof))
    for mutant in proof.mutants:
        assert mutant.kills
        assert set(mutant.kills) <= known, mutant.name
    names = [m.name for m in proof.mutants]
    assert len(names) == len(set(names))
    assert len(proof.laws) >= EXACT_LAWS


def test_the_table_has_every_mutant_with_the_layers_that_find_it() -> None:
    planted = [(op, m.name, sorted(m.kills)) for op in proof_names() for m in proof_of(op).mutants]
    again = "python -m tests.testing.fixtures.mutants"
    assert [(r["op"], r["mutant"], [*r["examples"]]) for r in TABLE] == planted, again


@pytest.mark.parametrize("op", proof_names())
def test_a_mutant_falls_at_its_smallest_example_and_the_reference_does_not(op: str) -> None:
    proof, declared = proof_of(op), catalogue()[op]
    by_name = {mutant.name: mutant for mutant in proof.mutants}
    wrong = []
    for row in TABLE:
        if row["op"] == op:
            spec = Spec.from_json(json.dumps(row["smallest"]))
            mutant, layer = by_name[row["mutant"]], row["layer"]
            if not tells_apart(proof, mutant, layer, declared, spec):
                wrong.append(f"{mutant.name}/{layer}")
    assert not wrong


def test_shrinking_keeps_what_holds_and_nothing_else() -> None:
    x = Operand("float16", "misalign", "huge", specials=((3, "nan"),))
    spec = Spec.of("silu_and_mul", {"tokens": 64, "half": 48}, {"x": x}, seed=7)

    def holds(s: Spec) -> bool:
        if s.dim["half"] == 1:
            raise RuntimeError
        return s.dim["tokens"] > 2 and s.operand["x"].regime == "huge"

    smallest = Spec.of(
        "silu_and_mul", {"tokens": 3, "half": 2}, {"x": Operand("float16", regime="huge")}
    )
    assert shrink(spec, holds) == smallest
