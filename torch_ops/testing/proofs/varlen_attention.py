"""Proof of varlen_attention."""

from torch_ops.testing.proof import Proof
from torch_ops.testing.proofs import _ragged_faults as faults
from torch_ops.testing.proofs import _ragged_specs as parts
from torch_ops.testing.proofs._ragged import PACKED
from torch_ops.testing.proofs._ragged_laws import LARGER_BOUNDS, LATER_QUERIES, laws

OP = "varlen_attention"
NAMED = (
    ("llama3-8b", 4, 1024, 1024), ("llama3-8b", 16, 1, 1024), ("llama3-8b", 3, 5, 7),
    ("smollm2-135m", 2, 17, 17), ("gemma2-2b", 2, 3, 9), ("mistral-7b", 2, 8192, 8192),
)  # fmt: skip

proof = Proof(
    op=OP,
    arguments=PACKED.arguments,
    shapes=PACKED.shapes,
    draw=parts.strategy(OP, PACKED),
    axes=parts.axes(PACKED),
    row=parts.row(OP, PACKED),
    zero=parts.zero(OP, PACKED),
    classes=parts.classes(OP, PACKED),
    named=parts.named(OP, PACKED, NAMED),
    oracle=PACKED.out_only,
    laws=laws(PACKED, LATER_QUERIES, LARGER_BOUNDS),
    mutants=(
        *faults.of_laws(PACKED, faults.out_only),
        *faults.of_rows(PACKED, faults.out_only),
        *faults.of_batches(PACKED, faults.out_only),
        *faults.of_packed(PACKED, faults.out_only),
        *faults.generic(PACKED, faults.out_only),
    ),
    fill=PACKED.fill,
    cost=8,
)
