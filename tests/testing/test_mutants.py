"""Every planted fault is found by the layer that names it, and every layer finds at least three."""

from __future__ import annotations

import pytest

from torch_ops.declarations import catalogue
from torch_ops.testing.mutants import MIN_MUTANTS, fall, layers
from torch_ops.testing.proof import proof_names, proof_of

EXACT_LAWS = 3
CASES = [
    (op, layer) for op in proof_names() for layer in layers(proof_of(op), catalogue()[op].contract)
]


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
    known = set(layers(proof, catalogue()[op].contract))
    for mutant in proof.mutants:
        assert mutant.kills
        assert set(mutant.kills) <= known, mutant.name
    names = [m.name for m in proof.mutants]
    assert len(names) == len(set(names))
    assert len(proof.laws) >= EXACT_LAWS
