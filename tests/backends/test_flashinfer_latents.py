"""FlashInfer's latent attention: what is planned, and which calls it doesn't take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_ops import CaptureError

from . import examples
from .model_flashinfer import Model

_sequences = examples.part("flashinfer", "_sequences")


def call(**changes: Any) -> dict[str, Any]:
    """Three sequences of 6, 0 and 3 tokens in pages of 4, views of one cache."""
    torch.manual_seed(0)
    pool = torch.randn(9, 4, 576).half()
    return {
        "q_nope": torch.randn(3, 16, 512).half(), "q_pe": torch.randn(3, 16, 64).half(),
        "ckv_cache": pool[..., :512], "kpe_cache": pool[..., 512:],
        "kv_indptr": torch.tensor([0, 2, 2, 3]).int(), "kv_indices": torch.tensor([7, 2, 5]).int(),
        "kv_last_page_len": torch.tensor([2, 4, 3]).int(), "scale": 0.125, **changes,
    }  # fmt: skip


def run(args: dict[str, Any]) -> Tensor:
    found: Tensor = examples.loaded("mla_decode", "flashinfer").function(*args.values())
    return found


def test_sequences_without_tokens_are_kept_from_it(flashinfer: Model) -> None:
    out = run(call())
    assert not out[1].any()
    assert out[::2].any(-1).all()
    assert flashinfer.called == [("plan", "fa2", [0, 2, 3], [6, 3], 16)]
    assert flashinfer.built == ["mla fa2"]


def test_where_no_sequence_has_tokens_nothing_is_planned(flashinfer: Model) -> None:
    assert not run(call(kv_indptr=torch.zeros(4, dtype=torch.int32))).any()
    assert not flashinfer.called


def test_queries_of_any_strides_give_contiguous_results(flashinfer: Model) -> None:
    args = call(kv_indptr=torch.tensor([0, 1, 2, 3]).int())
    swapped = args["q_nope"].transpose(0, 1).contiguous().transpose(0, 1)
    out = run(args | {"q_nope": swapped})
    assert out.is_contiguous()
    assert torch.equal(out, run(args))


def test_nothing_is_planned_in_a_capture(
    flashinfer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sequences, "capturing", lambda: True)
    with pytest.raises(CaptureError, match=r"op 'mla_decode': .* prepare first: take another"):
        run(call())
    assert not flashinfer.called


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"q_nope": torch.zeros(3, 16, 512)}, "q_nope dtype torch.float32 (supported: "
         "torch.float16, torch.bfloat16)"),
        ({"q_pe": torch.zeros(3, 16, 32).half()}, "latents of 512 and rotated parts of 32 elements "
         "(supported: 512 and 64)"),
        ({"scale": -0.5}, "scale -0.5 (supported: above 0; maxima are those of unscaled logits)"),
        ({"q_nope": torch.zeros(1, 1, 512).half().expand(4001, 250, 512)}, "4001 sequences of 250 "
         "heads (supported: 16000 tiles of 64 heads)"),
        ({"kpe_cache": torch.zeros(9, 4, 65).half()[..., 1:]}, "kpe_cache strides (260, 65, 1) for "
         "shape [9, 4, 64] (supported: 1 for the last axis, multiples of 8 for the others)"),
        ({"ckv_cache": torch.zeros(9 * 4 * 512 + 1).half()[1:].view(9, 4, 512)}, "ckv_cache is "
         "aligned to 2 bytes (supported: 16)"),
    ],
)  # fmt: skip
def test_refuses(changes: dict[str, Any], reason: str | None) -> None:
    assert examples.refusal("mla_decode", "flashinfer", *call(**changes).values()) == reason
