"""Which calls FlashInfer's backend takes besides those of `test_reasons`, and why not others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_ops import Platform
from torch_ops.attention import AttentionBackend

from . import examples
from .arguments import BRAIN, FULL, HALF, big, dense, off, rope_args, spec, strided, t

FA2, FA3 = AttentionBackend.FLASHINFER_FA2, AttentionBackend.FLASHINFER_FA3
_prefill = examples.part("flashinfer", "_prefill")


def refusal(op: str, *args: Any) -> str | None:
    return examples.refusal(op, "flashinfer", *args)


vector = torch.empty(64)
LAYER_NORMS: dict[str, tuple[tuple[Any, ...], str]] = {
    "dtype": ((t(3, 64), vector, vector), "x dtype torch.float16 (supported: torch.bfloat16)"),
    "no weight": ((t(3, 64, dtype=BRAIN), None, vector), "weight None (required by the kernel)"),
    "no bias": ((t(3, 64, dtype=BRAIN), vector), "bias None (required by the kernel)"),
    "weight dtype": (
        (t(3, 64, dtype=BRAIN), t(64, dtype=BRAIN), vector),
        "weight dtype torch.bfloat16 (supported: torch.float32)",
    ),
    "bias strides": (
        (t(3, 64, dtype=BRAIN), vector, torch.empty(128)[::2]),
        "bias strides (2,) for shape [64] (supported: 1)",
    ),
    "strides of one element": (
        (t(3, 1, dtype=BRAIN), torch.empty(2)[::2], torch.empty(1)),
        "weight strides (2,) for shape [1] (supported: 1)",
    ),
    "strides of one column": (
        (t(1, 2, dtype=BRAIN)[:, ::2], torch.empty(1), torch.empty(1)),
        "x strides (2, 2) for shape [1, 1] (supported: contiguous)",
    ),
    "bias pointer": (
        (t(3, 64, dtype=BRAIN), vector, off(vector)),
        "bias is aligned to 4 bytes (supported: 8)",
    ),
    "strides": (
        (t(3, 128, dtype=BRAIN)[:, :64], vector, vector),
        "x strides (128, 1) for shape [3, 64] (supported: contiguous)",
    ),
    "pointer": (
        (off(t(3, 64, dtype=BRAIN)), vector, vector), "x is aligned to 2 bytes (supported: 4)",
    ),
    "width": (
        (big(1, 49153, dtype=BRAIN), *[big(49153, dtype=FULL)] * 2),
        "rows of 49153 (supported: up to 49152, kept in shared memory)",
    ),
    "offsets": (
        (big(2**25 + 1, 64, dtype=BRAIN), *[big(64, dtype=FULL)] * 2),
        f"x of {2**31 + 64} elements (supported: up to {2**31}, offsets are 32 bits wide)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("args", "reason"), LAYER_NORMS.values(), ids=LAYER_NORMS)
def test_layer_norm_refuses(args: tuple[Any, ...], reason: str) -> None:
    assert refusal("layer_norm", *args) == reason


Q, K, CACHE, POSITIONS, _ = rope_args()
HALVES = "torch.float16, torch.bfloat16"
ROPES: dict[str, tuple[tuple[Any, ...], str]] = {
    "dtype": (rope_args(dtype=FULL), f"q dtype torch.float32 (supported: {HALVES})"),
    "rotary_dim": (
        rope_args(head_dim=128, rotary_dim=24),
        "rotary_dim 24 (supported for head_dim 128, neox: multiples of 16)",
    ),
    "interleaved rotary_dim": (
        rope_args(head_dim=512, rotary_dim=24, neox=False),
        "rotary_dim 24 (supported for head_dim 512, interleaved: multiples of 16)",
    ),
    "rotary_dim of another head_dim": (
        rope_args(head_dim=96, rotary_dim=48),
        "rotary_dim 48 (supported for head_dim 96, neox: multiples of 32)",
    ),
    "nothing to rotate": (
        rope_args(rotary_dim=0),
        "rotary_dim 0 (supported for head_dim 64, neox: multiples of 16)",
    ),
    "head_dim": (
        rope_args(head_dim=68, rotary_dim=32), "head_dim 68 (supported: multiples of 8)",
    ),
    "no heads of k": (rope_args(heads=(4, 0)), "no heads (supported: at least one)"),
    "heads": (
        (big(3, 65535, 64), big(3, 1, 64), big(10, 64, dtype=FULL), POSITIONS),
        "65536 heads of q and k (supported: up to 65535)",
    ),
    "cache strides": (
        (Q, K, torch.empty(10, 128)[:, :64], POSITIONS),
        "cos_sin_cache strides (128, 1), positions strides (1,) "
        "(supported: contiguous, the cache aligned to 16 bytes)",
    ),
    "positions strides": (
        (Q, K, CACHE, torch.zeros(6, dtype=torch.int64)[::2]),
        "cos_sin_cache strides (64, 1), positions strides (2,) "
        "(supported: contiguous, the cache aligned to 16 bytes)",
    ),
    "cache with narrow positions": (
        (Q, K, big(2**27, 64, dtype=FULL), POSITIONS.int()),
        f"cos_sin_cache of {2**33} elements with int32 positions "
        f"(supported: up to {2**32}, or int64 positions)",
    ),
    "q strides": (
        (strided(Q, 260, 65, 1), K, CACHE, POSITIONS),
        "q strides (260, 65, 1) for shape [3, 4, 64] "
        "(supported: 1 for the last axis, multiples of 8 for the others)",
    ),
    "k strides": (
        (Q, t(3, 2, 128)[..., ::2], CACHE, POSITIONS),
        "k strides (256, 128, 2) for shape [3, 2, 64] "
        "(supported: 1 for the last axis, multiples of 8 for the others)",
    ),
    "k pointer": ((Q, off(K), CACHE, POSITIONS), "k is aligned to 2 bytes (supported: 16)"),
}  # fmt: skip


@pytest.mark.parametrize("op", ["apply_rope", "apply_rope_"])
@pytest.mark.parametrize(("args", "reason"), ROPES.values(), ids=ROPES)
def test_rope_refuses(op: str, args: tuple[Any, ...], reason: str) -> None:
    assert refusal(op, *args) == reason


def test_rope_in_place_refuses_what_one_warp_does_not_rotate() -> None:
    args = rope_args(head_dim=96, rotary_dim=96)
    assert refusal("apply_rope", *args) is None
    assert refusal("apply_rope_", *args) == (
        "rotary_dim 96 in place (supported for head_dim 96: 32, 64, 128, 256, 512)"
    )
    assert refusal("apply_rope_", *rope_args(head_dim=96, rotary_dim=96, neox=False)) is None


@pytest.mark.parametrize("op", ["apply_rope", "apply_rope_"])
def test_rope_takes(op: str) -> None:
    packed = t(3, 8, 64)
    views = packed[:, :4], packed[:, 4:6], CACHE, POSITIONS.int(), False
    for args in (rope_args(), views, rope_args(tokens=0), rope_args(head_dim=256, rotary_dim=32)):
        assert refusal(op, *args) is None


DQ, DK, DV = dense()
ATTENTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "dtype": (dense(dtype=FULL), f"q dtype torch.float32 (supported: {HALVES})"),
    "head_dim": (dense(head_dim=80), "head_dim 80 (supported: 64, 128, 256)"),
    "head_dim of v": (
        (DQ, DK, t(1, 7, 2, 128)), "head_dim 128 of v (supported: 64, that of q)",
    ),
    "soft cap": (
        (DQ, DK, DV, False, None, -1, 30.0),
        "logits_soft_cap 30.0 (supported: 0.0; tanh.approx.f32 has a relative error of 2**-11, "
        "the op's contract: float32)",
    ),
    "scale": (
        (DQ, DK, DV, False, 0.0),
        "scale 0.0 (supported: at least 0.001, masked logits being -50000)",
    ),
    "batch strides": (
        (t(2, 9, 4, 64)[:, :5], t(2, 7, 2, 64), t(2, 7, 2, 64)),
        "q strides (2304, 256, 64, 1) for shape [2, 5, 4, 64] "
        "(supported: sequences one after another in a batch)",
    ),
    "strides": (
        (DQ, DK, strided(DV, 924, 132, 66, 1)),
        "v strides (924, 132, 66, 1) for shape [1, 7, 2, 64] "
        "(supported: 1 for the last axis, multiples of 8 for the others)",
    ),
    "expanded": (
        (DQ, t(1, 1, 2, 64).expand(1, 7, 2, 64), DV),
        "k strides (128, 0, 64, 1) for shape [1, 7, 2, 64] "
        "(supported: 1 for the last axis, multiples of 8 for the others)",
    ),
    "pointer": ((DQ, off(DK), DV), "k is aligned to 2 bytes (supported: 16)"),
    "offsets": (
        (DQ, big(1, 2**25 + 1, 2, 64), big(1, 2**25 + 1, 2, 64)),
        f"k spans {2**32 + 128} elements (supported: up to {2**32})",
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", ["attention", "attention_with_lse"])
@pytest.mark.parametrize(("args", "reason"), ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_refuses(op: str, args: tuple[Any, ...], reason: str) -> None:
    assert refusal(op, *args) == reason


@pytest.mark.parametrize("op", ["attention", "attention_with_lse"])
def test_attention_takes(op: str) -> None:
    packed = t(1, 7, 8, 64)
    views = packed[:, :, :4], packed[:, :, 4:6], packed[:, :, 6:]
    one_token = strided(t(3, 1, 4, 64), 512, 8, 64, 1)
    for args in (
        (DQ, DK, DV), views, dense(batch=3), dense(keys=0), dense(queries=0), dense(batch=0),
        (one_token, *dense(batch=3)[1:]), (*dense(head_dim=256), True, 1.0, 3),
    ):  # fmt: skip
        assert refusal(op, *args) is None


def test_layers_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    module = examples.part("flashinfer", "attention")
    kinds = {"cuda:0": Platform.cuda((9, 0), 0), "cuda:1": Platform.cuda((8, 0), 1)}
    monkeypatch.setattr(Platform, "detect", lambda device=None: kinds[str(device)])
    _prefill._judged.cache_clear()
    hopper, ampere = torch.device("cuda:0"), torch.device("cuda:1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert module.supports(spec(), hopper, HALF, FA3) is None
    assert module.supports(spec(), hopper, HALF, FA2) is None
    assert module.supports(spec(), ampere, HALF, FA2) is None
    assert module.supports(spec(), ampere, HALF, FA3) == "arch sm_80 (supported by FA3: sm_90)"
    assert (_prefill.family(hopper), _prefill.family(ampere)) == ("fa3", "fa2")
    assert "head_dim 80" in module.supports(spec(80), hopper, HALF, FA2)
    assert "dtype torch.float32" in module.supports(spec(), hopper, FULL, FA3)
    assert "soft_cap 5" in module.supports(spec(cap=5.0), hopper, HALF, FA3)
    assert "scale -1.0" in module.supports(spec(scale=-1.0), hopper, HALF, FA3)
    _prefill._judged.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "12.1")
    assert module.supports(spec(), hopper, HALF, FA3) == (
        "CUDA 12.1 (supported by FA3: 12.3 and newer)"
    )
    monkeypatch.undo()
    _prefill._judged.cache_clear()
