"""What ragged Specs are built to: tables that fit their lengths, and NaN where nobody reads."""

from __future__ import annotations

import pytest
import torch

from torch_ops.testing import Operand, build
from torch_ops.testing.proofs._paged import NO_PAGE, PREFILL
from torch_ops.testing.proofs._ragged import PACKED, lengths, spec_of

QUERIES, KEYS = [3, 0, 7, 1, 5], [5, 4, 2, 0, 9]
X = {"q": Operand("float16")}


def test_packed_rows() -> None:
    spec = spec_of("varlen_attention", PACKED, PACKED.dims["ragged"], X, {}, slack=3)
    args = build(spec)
    assert args["qo_indptr"].tolist() == [0, 3, 3, 10, 11, 16]
    assert args["kv_indptr"].tolist() == [0, 5, 9, 11, 11, 20]
    assert (args["max_qo_len"], args["max_kv_len"]) == (10, 12)
    for name, used in (("q", 16), ("k", 20), ("v", 20)):
        assert bool(args[name][:used].isfinite().all())
        assert bool(args[name][used:].isnan().all())
        assert len(args[name]) == used + 2


def test_pages() -> None:
    spec = spec_of("paged_prefill", PREFILL, PREFILL.dims["ragged"], X, {"is_causal": True})
    assert (lengths(spec, "qo"), lengths(spec, "kv")) == (QUERIES, KEYS)
    args = build(spec)
    assert args["kv_indptr"].tolist() == [0, 2, 3, 4, 4, 7]
    assert args["kv_last_page_len"].tolist() == [1, 4, 2, 4, 1]  # the fourth has no page
    table = args["kv_indices"].tolist()
    assert table[7:] == [NO_PAGE] * 2
    assert len(set(table[:7])) == 7
    assert set(table[:7]) <= set(range(12))
    for name in ("k_cache", "v_cache"):
        slots = args[name].isfinite().all(-1).all(-1)
        assert torch.equal(slots, ~args[name].isnan().any(-1).any(-1))
        assert int(slots.sum()) == sum(KEYS)
    for run, keys in zip(PREFILL.runs(args), KEYS, strict=True):
        assert len(run.keys[0]) == keys
        assert bool(args["k_cache"][run.keys].isfinite().all())


@pytest.mark.parametrize("seed", range(3))
def test_some_pages_are_past_16_bits(seed: int) -> None:
    spec = spec_of("paged_prefill", PREFILL, PREFILL.dims["far"], X, {}, seed)
    assert int(build(spec)["kv_indices"][:14].min()) >= 2**16
