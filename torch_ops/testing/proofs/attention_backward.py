"""Proof of attention_backward."""

from torch_ops.testing.proof import Proof
from torch_ops.testing.proofs import _attention_gradients as parts
from torch_ops.testing.proofs._attention_gradient_faults import mutants
from torch_ops.testing.proofs._attention_gradient_laws import LAWS

proof = Proof(
    op=parts.OP,
    arguments=parts.ARGUMENTS,
    shapes=parts.shapes,
    draw=parts.draw,
    axes=parts.AXES,
    row=parts.row,
    zero=parts.zero,
    classes=parts.classes,
    named=parts.named,
    oracle=parts.oracle,
    laws=LAWS,
    mutants=mutants(),
    fill=parts.fill,
    cost=8,
)
