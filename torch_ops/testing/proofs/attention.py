"""Proof of attention."""

from torch_ops.testing.proof import Proof
from torch_ops.testing.proofs import _attention as parts
from torch_ops.testing.proofs._attention_faults import mutants, only_out
from torch_ops.testing.proofs._attention_laws import LAWS

OP = "attention"

proof = Proof(
    op=OP,
    arguments=parts.ARGUMENTS,
    shapes=parts.shapes,
    draw=parts.strategy(OP),
    axes=parts.AXES,
    row=parts.row(OP),
    zero=parts.zero(OP),
    classes=parts.classes(OP),
    named=parts.named(OP),
    oracle=parts.out_only,
    laws=LAWS,
    mutants=mutants(only_out),
    cost=4,
)
