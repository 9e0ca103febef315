"""Proof of paged_prefill."""

from torch_ops.testing.proof import Proof
from torch_ops.testing.proofs import _ragged_faults as faults
from torch_ops.testing.proofs import _ragged_specs as parts
from torch_ops.testing.proofs._paged import PREFILL, pages
from torch_ops.testing.proofs._paged_faults import of_pages
from torch_ops.testing.proofs._paged_laws import MOVED_PAGES, ONE_PAGE
from torch_ops.testing.proofs._ragged_laws import LATER_QUERIES, laws

OP = "paged_prefill"
NAMED = (
    ("llama3-8b", 4, 512, 2048), ("llama3-8b", 3, 5, 21), ("smollm2-135m", 2, 17, 33),
    ("gemma2-2b", 2, 3, 17), ("mistral-7b", 1, 2048, 8192),
    ("llama3-8b", 2, 9, 40), ("smollm2-135m", 3, 4, 8), ("mistral-7b", 2, 3, 30),
)  # fmt: skip

proof = Proof(
    op=OP,
    arguments=PREFILL.arguments,
    shapes=PREFILL.shapes,
    draw=parts.strategy(OP, PREFILL, pages),
    axes=parts.axes(PREFILL),
    row=parts.row(OP, PREFILL),
    zero=parts.zero(OP, PREFILL),
    classes=parts.classes(OP, PREFILL, page_size=2, spare=0),
    named=parts.named(OP, PREFILL, NAMED, page_size=16),
    oracle=PREFILL.out_only,
    laws=laws(PREFILL, LATER_QUERIES, MOVED_PAGES, ONE_PAGE),
    mutants=(
        *faults.of_laws(PREFILL, faults.out_only),
        *faults.of_rows(PREFILL, faults.out_only),
        *faults.of_batches(PREFILL, faults.out_only),
        *of_pages(PREFILL, faults.out_only),
        *faults.generic(PREFILL, faults.out_only),
    ),
    fill=PREFILL.fill,
    cost=8,
)
