"""Proof of attention_with_lse."""

from torch_ops.testing.proof import Proof
from torch_ops.testing.proofs import _attention as parts
from torch_ops.testing.proofs._attention_faults import lse_mutants, mutants
from torch_ops.testing.proofs._attention_laws import LAWS, SPLIT_KEYS

OP = "attention_with_lse"

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
    oracle=parts.with_lse,
    laws=(*LAWS, SPLIT_KEYS),
    mutants=(*mutants(lambda kernel: kernel), *lse_mutants()),
    cost=4,
)
