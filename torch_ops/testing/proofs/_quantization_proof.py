"""The proof of a quantization of one form."""

from __future__ import annotations

from torch_ops.testing.proof import Proof
from torch_ops.testing.proofs import _quantization as specs
from torch_ops.testing.proofs._quantization_faults import mutants
from torch_ops.testing.proofs._quantization_laws import laws

COST = 4


def quantization_proof(form: specs.Form) -> Proof:
    """The proof of a quantization."""
    return Proof(
        op=form.op,
        arguments=form.arguments,
        shapes=specs.shapes,
        draw=specs.strategy(form),
        axes=specs.axes(form),
        row=specs.row(form),
        zero=specs.zero(form),
        classes=specs.classes(form),
        named=specs.named(form),
        oracle=specs.oracle(form),
        laws=laws(form),
        mutants=mutants(form),
        cost=COST,
    )
