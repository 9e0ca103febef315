"""Proof of mla_decode."""

from torch_ops.testing.proof import Proof
from torch_ops.testing.proofs import _latents as parts
from torch_ops.testing.proofs._latent_faults import mutants
from torch_ops.testing.proofs._latent_laws import LAWS

proof = Proof(
    op=parts.OP,
    arguments=parts.FORM.arguments,
    shapes=parts.FORM.shapes,
    draw=parts.strategy,
    axes=parts.AXES,
    row=parts.row,
    zero=parts.zero,
    classes=parts.classes,
    named=parts.named,
    oracle=parts.FORM.out_only,
    laws=LAWS,
    mutants=mutants(),
    fill=parts.FORM.fill,
    cost=16,
)
