"""Proof of paged_decode."""

from torch_ops.testing.proof import Proof
from torch_ops.testing.proofs import _ragged_faults as faults
from torch_ops.testing.proofs import _ragged_specs as parts
from torch_ops.testing.proofs._paged import DECODE, pages
from torch_ops.testing.proofs._paged_faults import of_pages
from torch_ops.testing.proofs._paged_laws import MOVED_PAGES, ONE_PAGE
from torch_ops.testing.proofs._ragged_laws import laws

OP = "paged_decode"
NAMED = (
    ("llama3-8b", 16, 1, 4096), ("llama3-8b", 64, 1, 1024), ("llama3-8b", 3, 1, 33),
    ("smollm2-135m", 4, 1, 17), ("gemma2-2b", 2, 1, 16), ("mistral-7b", 4, 1, 8192),
)  # fmt: skip

proof = Proof(
    op=OP,
    arguments=DECODE.arguments,
    shapes=DECODE.shapes,
    draw=parts.strategy(OP, DECODE, pages),
    axes=parts.axes(DECODE),
    row=parts.row(OP, DECODE),
    zero=parts.zero(OP, DECODE),
    classes=parts.classes(OP, DECODE, page_size=2, spare=0),
    named=parts.named(OP, DECODE, NAMED, page_size=16),
    oracle=DECODE.out_only,
    laws=laws(DECODE, MOVED_PAGES, ONE_PAGE),
    mutants=(
        *faults.of_laws(DECODE, faults.out_only),
        *faults.of_batches(DECODE, faults.out_only),
        *of_pages(DECODE, faults.out_only),
        *faults.generic(DECODE, faults.out_only),
    ),
    fill=DECODE.fill,
    cost=8,
)
