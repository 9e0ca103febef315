"""sgl-kernel's FlashMLA: right on one cache of latents and rotated parts, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_ops.once import KernelLoadError
from torch_ops.testing.proofs._latents import FORM
from torch_ops.testing.proofs._ragged import sized, spec_of
from torch_ops.testing.spec import Operand, Spec

from . import examples
from .model_sgl_kernel import Model

OP = "mla_decode"
HALVES = ("float16", "bfloat16")


def joined(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same call with both caches in one."""
    pool = torch.cat(args[2:4], -1)
    return *args[:2], pool[..., :512], pool[..., 512:], *args[4:]


def on_one_cache(*args: Any) -> Tensor:
    """Call the backend's own function, which has to take the call."""
    given = joined(args)
    assert examples.refusal(OP, "sgl_kernel", *given) is None
    found: Tensor = examples.loaded(OP, "sgl_kernel").function(*given)
    return found


def specs(dtype: str) -> Iterator[Spec]:
    """Few heads and many, sequences of no tokens, of whole pages and of many."""
    cases = ((1, [9]), (16, [70, 0, 3]), (70, [64, 1]), (128, [0, 130]))
    for i, (heads, keys) in enumerate(cases):
        sizes = {"heads": heads, "latent": 512, "rope": 64, "page_size": 64}
        dims = sized([], keys, pad=i % 2, spare=2, **sizes)
        yield spec_of(OP, FORM, dims, {"q_nope": Operand(dtype)}, {"scale": 0.125}, seed=i)


@pytest.mark.parametrize("dtype", HALVES)
def test_right_on_one_cache(sgl_kernel: Model, dtype: str) -> None:
    subject = examples.function(on_one_cache)
    assert examples.examine(subject, OP, list(specs(dtype)), laws=False).executed == 4
    assert {call[0] for call in sgl_kernel.called} == {"dense_decode_fwd"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("dtype", HALVES)
def test_right_on_a_gpu(dtype: str) -> None:
    pytest.importorskip("sgl_kernel", reason="sglang-kernel is not installed")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashMLA's dense decode is for sm_90")
    subject = examples.function(on_one_cache)
    examples.examine(subject, OP, list(specs(dtype)), device="cuda", laws=False)


def call(**changes: Any) -> list[Any]:
    pool = torch.zeros(4, 64, 576).half()
    return list({
        "q_nope": torch.zeros(2, 16, 512).half(), "q_pe": torch.zeros(2, 16, 64).half(),
        "ckv_cache": pool[..., :512], "kpe_cache": pool[..., 512:],
        "kv_indptr": torch.tensor([0, 2, 3]).int(), "kv_indices": torch.tensor([3, 0, 1]).int(),
        "kv_last_page_len": torch.tensor([9, 64]).int(), "scale": 0.125, **changes,
    }.values())  # fmt: skip


APART = (
    "caches that are apart (supported: views of one, [P, 64, 576], latents before rotated parts)"
)
_odd = torch.zeros(4, 64, 577).half()
_late = torch.zeros(4 * 64 * 576 + 1).half()[1:].view(4, 64, 576)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"q_nope": torch.zeros(2, 16, 512)}, "q_nope dtype torch.float32 (supported: "
         "torch.float16, torch.bfloat16)"),
        ({"q_pe": torch.zeros(2, 16, 32).half()}, "latents of 512 and rotated parts of 32 elements "
         "(supported: 512 and 64)"),
        ({"ckv_cache": torch.zeros(4, 16, 512).half()}, "pages of 16 tokens (supported: 64)"),
        ({"scale": 0.0}, "scale 0.0 (supported: above 0; maxima are those of unscaled logits)"),
        ({"kv_indices": torch.zeros(1).int().expand(2**26)}, "67108864 listed pages of 2 sequences "
         "(supported: a product of at most 67108864)"),
        ({"kpe_cache": torch.zeros(4, 64, 64).half()}, APART),
        ({"ckv_cache": _odd[..., :512], "kpe_cache": _odd[..., 512:576]}, "ckv_cache strides "
         "(36928, 577, 1) for shape [4, 64, 512] (supported: 1 for the last axis, multiples of 8 "
         "for the others)"),
        ({"ckv_cache": _late[..., :512], "kpe_cache": _late[..., 512:]}, "ckv_cache is aligned to "
         "2 bytes (supported: 16)"),
    ],
)  # fmt: skip
def test_refuses(changes: dict[str, Any], reason: str | None) -> None:
    assert examples.refusal(OP, "sgl_kernel", *call(**changes)) == reason


def test_a_library_without_it_fails_explained(
    sgl_kernel: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel.flashmla_ops", None)
    with pytest.raises(KernelLoadError, match=r"sgl-kernel's flashmla_ops: ModuleNotFoundError"):
        examples.loaded(OP, "sgl_kernel").function(*call())
