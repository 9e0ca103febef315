"""Proofs of norms that are quantized by rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torch_ops.declarations import catalogue
from torch_ops.testing.proof import Proof
from torch_ops.testing.proofs import _norm_faults as fault
from torch_ops.testing.proofs import _norms
from torch_ops.testing.proofs._fused_quantization import Oracle, fused_oracle, laws, mutants

VECTORS = {"weight": False}


def wide_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """An rms norm of rows that isn't rounded to their dtype."""
    return fault.rms(finish=lambda y, _: y)(x, weight, eps)


def norm_proof(
    op: str,
    before: str,
    rows: Sequence[str],
    oracle: Oracle,
    wrong: Callable[..., Any],
    wide: Callable[..., Any],
) -> Proof:
    """The proof of quantizing what the op `before` gives; `mutants` explains the kernels."""
    vectors = tuple(VECTORS)
    right = catalogue()[before].reference
    return Proof(
        op=op,
        arguments=(*rows, "weight", "eps"),
        shapes=_norms.shapes(rows, vectors),
        draw=_norms.strategy(op, rows, VECTORS),
        axes=_norms.AXES,
        row=_norms.row(op, rows, VECTORS),
        zero=_norms.zero(op, rows, vectors),
        classes=_norms.classes(op, rows, vectors),
        named=_norms.named(op, rows, vectors),
        oracle=fused_oracle(before, oracle),
        laws=laws(before, rows, odd=True),
        mutants=mutants(right, wrong, wide, tuple(range(len(rows))), odd=True),
        cost=4,
    )
