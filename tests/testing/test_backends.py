"""The whole kit, CI profile, on every op of the backends that run anywhere."""

from __future__ import annotations

import pytest

from torch_ops.testing.draw import FLOATS
from torch_ops.testing.proof import proof_names, proof_of
from torch_ops.testing.verify import verify

# A backend that compiles takes about a second for each class of calls, and several where an example
# is costly: one dtype an op, each dtype some ops, few classes, and no costly op. All of it is what
# `torch-ops verify` runs.
COMPILED = [
    (op, FLOATS[i % len(FLOATS)])
    for i, op in enumerate(name for name in proof_names() if proof_of(name).cost == 1)
]
CLASSES = 4
# Weight and bias, each absent, of x's dtype or of another: nine classes before any size of one.
OTHER_CLASSES = {"layer_norm": 12, "apply_rope": 1, "apply_rope_": 1}  # rope compiles for long


@pytest.mark.parametrize("op", proof_names())
def test_the_reference_is_proven(op: str) -> None:
    result = verify(op, "torch")
    assert result.ok, str(result)
    assert [cell.verdict for cell in result.cells] == ["passed"] * len(FLOATS)


@pytest.mark.parametrize(("op", "dtype"), COMPILED)
def test_the_compiled_reference_is_proven(op: str, dtype: str) -> None:
    limit = OTHER_CLASSES.get(op, CLASSES)
    result = verify(op, "inductor", dtypes=(dtype,), max_classes=limit)
    assert result.ok, str(result)
