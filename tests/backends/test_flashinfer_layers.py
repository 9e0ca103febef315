"""Paged calls of layers on FlashInfer: planned once for layers alike, and kept in one place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from torch_ops import BackendUnavailableError
from torch_ops.attention import AttentionBackend, AttentionMetadata, AttentionSpec
from torch_ops.attention.prepared import PreparedAttention
from torch_ops.declarations import catalogue

from . import examples
from .model_flashinfer import Model

_attention = examples.part("flashinfer", "attention")
FA2, FA3 = (AttentionBackend(f"flashinfer_fa{n}") for n in "23")
SPEC = AttentionSpec(4, 2, 64, 0.125, True, -1, 0.0)
HALF, CPU = torch.float16, torch.device("cpu")
STEPS = (([3, 6, 9], [[5], [2, 7], [0, 1, 8]]), ([4, 7], [[3], [8, 2]]))


def prepared(spec: AttentionSpec = SPEC) -> PreparedAttention:
    found: PreparedAttention = _attention.prepare(spec, CPU, HALF, FA2)
    return found


def decode() -> AttentionMetadata:
    kv_lens, pages = STEPS[0]
    return AttentionMetadata.paged([1] * 3, kv_lens, pages, page_size=4, num_pages=9, device="cpu")


def tensors(rows: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(rows, 4, 64).half()
    k, v = torch.randn(9, 2, 4, 2, 64).half().unbind(1)  # keys and values of a page lie together
    return q, k, v


@contextlib.contextmanager
def filled() -> Iterator[None]:
    """Memory that isn't written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def reference(q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> Tensor:
    tables = metadata.tables
    table = tables.kv_indptr, tables.kv_indices, tables.kv_last_page_len
    numbers = SPEC.is_causal, SPEC.scale, -1, 0.0
    bounds = tables.qo_indptr
    out: Tensor = catalogue()["paged_prefill"].reference(q, k, v, bounds, *table, *numbers)
    return out


def test_steps_are_planned_where_the_first_one_was(flashinfer: Model) -> None:
    first, second, metadata = prepared(), prepared(), decode()
    plan = metadata.planned(first)
    assert metadata.planned(second) is plan, "layers alike share it"
    assert flashinfer.built == ["batch fa2 64 False"]
    buffers = {name: tensor.data_ptr() for name, tensor in plan._wrapper._buffers.items()}
    q, k, v = tensors()
    for kv_lens, pages in STEPS:
        metadata.plan([1] * len(kv_lens), kv_lens, pages)
        with filled():
            out = first.run_paged(q, k, v, metadata.tables, plan)
        torch.testing.assert_close(out, reference(q, k, v, metadata), rtol=1e-2, atol=1e-3)
        assert torch.equal(out[len(kv_lens) :], torch.zeros_like(q[len(kv_lens) :]))
    assert {n: t.data_ptr() for n, t in plan._wrapper._buffers.items()} == buffers
    assert [call[0] for call in flashinfer.called] == ["plan", "plan", "run", "plan", "run"]


def test_prefill_has_rows_of_several_lengths(flashinfer: Model) -> None:
    layer = prepared()
    metadata = AttentionMetadata.paged(
        [2, 0, 5], [3, 6, 9], STEPS[0][1], page_size=4, num_pages=9, device="cpu"
    )
    q, k, v = tensors(8)  # one row is padding
    with filled():
        out = layer.run_paged(q, k, v, metadata.tables, metadata.planned(layer))
    torch.testing.assert_close(out, reference(q, k, v, metadata), rtol=1e-2, atol=1e-3)
    assert torch.equal(out[7], torch.zeros_like(q[7]))


def test_a_step_that_decodes_may_have_sequences_of_nothing(flashinfer: Model) -> None:
    layer, pages = prepared(), STEPS[0][1]
    metadata = AttentionMetadata.paged(
        [1, 0, 1], [3, 0, 9], [pages[0], [], pages[2]], page_size=4, num_pages=9, device="cpu"
    )
    q, k, v = tensors()
    with filled():
        out = layer.run_paged(q, k, v, metadata.tables, metadata.planned(layer))
    wanted = catalogue()["paged_decode"].reference(q, k, v, *metadata.tables[1:4], SPEC.scale)
    torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-3)
    assert torch.equal(out[1], torch.zeros_like(q[1]))


@pytest.mark.parametrize(("causal", "queries", "keys"), [(True, 5, 3), (True, 2, 0), (False, 2, 0)])
def test_queries_without_a_key_are_refused(
    causal: bool, queries: int, keys: int, flashinfer: Model
) -> None:
    layer = prepared(AttentionSpec(4, 2, 64, 0.125, causal, -1, 0.0))
    metadata = AttentionMetadata.paged(
        [queries], [keys], [[0]] if keys else [[]], page_size=4, num_pages=9, device="cpu"
    )
    with pytest.raises(BackendUnavailableError, match=f"{queries} queries of {keys} keys"):
        metadata.planned(layer)


def test_caches_that_it_cannot_read_are_refused(flashinfer: Model) -> None:
    layer, metadata = prepared(), decode()
    plan, (q, k, v) = metadata.planned(layer), tensors()
    for bad, text in (
        ((k, v.contiguous()), "v strides"),
        ((k.mT.contiguous().mT,) * 2, "k strides"),
        ((torch.zeros(9 * 4 * 2 * 64 + 1).half()[1:].view(9, 4, 2, 64),) * 2, "k is aligned to 2"),
    ):
        with pytest.raises(BackendUnavailableError, match=text):
            layer.run_paged(q, *bad, metadata.tables, plan)


def test_families_say_what_they_serve() -> None:
    assert _attention.supports_paged(SPEC, CPU, HALF, FA2) is None
    assert "flashinfer_fa2 takes them" in _attention.supports_paged(SPEC, CPU, HALF, FA3)
    assert "q dtype" in _attention.supports_paged(SPEC, CPU, torch.float32, FA2)
