"""FlashInfer's backend for sequences of different lengths: what it takes and what it plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_ops import CaptureError

from . import examples
from .model_flashinfer import Model

_sequences = examples.part("flashinfer", "_sequences")
BOUNDS = torch.tensor([0, 2, 2, 7], dtype=torch.int32)  # of the queries
PAGES = torch.tensor([0, 1, 1, 3], dtype=torch.int32)
LAST = torch.tensor([4, 1, 3], dtype=torch.int32)


def paged(**changes: Any) -> dict[str, Any]:
    """Three sequences of 2, 0 and 5 queries and of 4, 0 and 7 keys in pages of 4."""
    torch.manual_seed(0)
    caches = {n: torch.randn(9, 4, 2, 64).half() for n in ("k_cache", "v_cache")}
    table = {"kv_indptr": PAGES, "kv_indices": torch.tensor([7, 2, 5]).int()}
    return {
        "q": torch.randn(7, 4, 64).half(), **caches, "qo_indptr": BOUNDS, **table,
        "kv_last_page_len": LAST, "is_causal": True, "scale": None, "window_left": -1,
        "logits_soft_cap": 0.0, **changes,
    }  # fmt: skip


def run(args: dict[str, Any], op: str = "paged_prefill") -> Tensor:
    found: Tensor = examples.loaded(op, "flashinfer").function(*args.values())
    return found


def test_one_plan_a_call_of_the_lengths_in_the_table(flashinfer: Model) -> None:
    run(paged())
    run(paged(kv_last_page_len=torch.tensor([2, 1, 3]).int()))
    plans = [call for call in flashinfer.called if call[0] == "plan"]
    assert plans == [("plan", "fa2", [0, 2, 2, 7], [0, 1, 1, 3], 4, 2, 64)] * 2
    assert flashinfer.built == ["batch fa2 64 False"]


def test_queries_without_keys_are_kept_from_it(flashinfer: Model) -> None:
    args = paged(qo_indptr=torch.tensor([0, 1, 3, 6]).int())  # of three, none; one is padding
    out = run(args)
    assert not out[1:3].any()
    assert not out[6:].any()
    assert out[0].any()
    assert out[3:6].any(-1).all()
    plans = [call for call in flashinfer.called if call[0] == "plan"]
    assert plans == [("plan", "fa2", [0, 1, 1, 4], [0, 1, 1, 3], 4, 2, 64)]


def test_queries_before_the_first_key_are_kept_from_it(flashinfer: Model) -> None:
    args = paged(qo_indptr=torch.tensor([0, 6, 6, 7]).int())  # six for four keys
    out = run(args)
    assert not out[:2].any()
    assert out[2:].any(-1).all()
    assert not run(paged(kv_indptr=torch.zeros(4, dtype=torch.int32))).any()
    assert len([call for call in flashinfer.called if call[0] == "run"]) == 1


def test_nothing_is_planned_in_a_capture(
    flashinfer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sequences, "capturing", lambda: True)
    with pytest.raises(CaptureError, match=r"op 'paged_prefill': FlashInfer plans.*prepare first"):
        run(paged())
    assert not flashinfer.called


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q": torch.zeros(7, 4, 64)}, "q dtype torch.float32 (supported: torch.float16, "
         "torch.bfloat16)"),
        ({"v_cache": torch.zeros(9, 4, 2, 128).half()}, "head_dim 128 of v_cache (supported: 64, "
         "that of q)"),
        ({"logits_soft_cap": 5.0}, "logits_soft_cap 5.0 (supported: 0.0; tanh.approx.f32 has a "
         "relative error of 2**-11, the op's contract: float32)"),
        ({"v_cache": torch.zeros(9, 2, 4, 64).half().transpose(1, 2)}, "v_cache strides "
         "(512, 64, 256, 1) for shape [9, 4, 2, 64] (supported: (512, 128, 64, 1), those of "
         "k_cache)"),
        ({"k_cache": torch.zeros(1, 4, 2, 64).half().expand(9, 4, 2, 64)}, "k_cache strides "
         "(0, 128, 64, 1) for shape [9, 4, 2, 64] (supported: 1 for the last axis, multiples of 8 "
         "for the others)"),
    ],
)  # fmt: skip
def test_refuses(changes: dict[str, Any], reason: str) -> None:
    assert examples.refusal("paged_prefill", "flashinfer", *paged(**changes).values()) == reason


def test_takes_heads_first_and_interleaved_caches(flashinfer: Model) -> None:
    pool = torch.randn(9, 2, 4, 2, 64).half()
    caches = {"k_cache": pool[:, 0], "v_cache": pool[:, 1]}
    first = {n: c.transpose(1, 2).contiguous().transpose(1, 2) for n, c in caches.items()}
    for each in (caches, first):
        assert examples.refusal("paged_prefill", "flashinfer", *paged(**each).values()) is None
    assert torch.equal(run(paged(**caches)), run(paged(**first)))


def packed(**changes: Any) -> dict[str, Any]:
    """Three sequences of 2, 0 and 5 queries and of 4, 0 and 7 keys; one more key is nobody's."""
    torch.manual_seed(0)
    rows = {n: torch.randn(12, 2, 64).half() for n in "kv"}
    return {
        "q": torch.randn(7, 4, 64).half(), **rows, "qo_indptr": BOUNDS,
        "kv_indptr": torch.tensor([0, 4, 4, 11]).int(), "max_qo_len": 5, "max_kv_len": 7,
        "is_causal": True, "scale": None, "window_left": -1, "logits_soft_cap": 0.0, **changes,
    }  # fmt: skip


def test_fa3_takes_packed_keys_as_pages(flashinfer: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies values behind a packed sequence by zero, of which NaN makes NaN."""
    wanted = run(packed(), "varlen_attention")
    monkeypatch.setattr(examples.part("flashinfer", "_prefill"), "family", lambda device: "fa3")
    monkeypatch.setattr(
        examples.part("flashinfer", "varlen_attention"), "family", lambda device: "fa3"
    )
    args = packed()
    for name in "kv":
        args[name][4:] = torch.nan
    assert torch.equal(run(args, "varlen_attention")[:2], wanted[:2])
    args = packed()
    for name in "kv":
        args[name][11:] = torch.nan
    assert torch.equal(run(args, "varlen_attention"), wanted)
    assert ("plan", "fa3", [0, 2, 2, 7], [0, 4, 4, 11], 4, 2, 64) in flashinfer.called
    args = packed(v=torch.stack([packed()["v"]] * 2, 2)[:, :, 0])
    assert examples.refusal("varlen_attention", "flashinfer", *args.values()) == (
        "v strides (256, 128, 1) for shape [12, 2, 64] (supported: (128, 64, 1), those of k)"
    )


def test_axes_of_one_element_have_the_usual_strides(flashinfer: Model) -> None:
    """FlashInfer reads them, too: FA3 fails by odd ones, and caches have to agree."""
    caches = {n: paged()[n][:1, :, :1].contiguous() for n in ("k_cache", "v_cache")}
    odd = caches["v_cache"].clone().as_strided((1, 4, 1, 64), (1, 64, 3, 1))
    table = {"kv_indptr": torch.tensor([0, 1]).int(), "kv_indices": torch.zeros(1).int()}
    table |= {"qo_indptr": torch.tensor([0, 3]).int(), "kv_last_page_len": torch.tensor([4]).int()}
    args = paged(q=paged()["q"][:3, :1], **caches, **table)
    assert torch.equal(run({**args, "v_cache": odd}), run({**args, "v_cache": odd.contiguous()}))
    packed = {"q": args["q"].clone().as_strided((3, 1, 64), (64, 1, 1)), "k": odd[0], "v": odd[0]}
    bounds = {"qo_indptr": table["qo_indptr"], "kv_indptr": torch.tensor([0, 4]).int()}
    numbers: dict[str, Any] = {"max_qo_len": 3, "max_kv_len": 4, "is_causal": True, "scale": None}
    numbers |= {"window_left": -1, "logits_soft_cap": 0.0}
    assert run({**packed, **bounds, **numbers}, "varlen_attention").any(-1).all()
