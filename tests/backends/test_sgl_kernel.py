"""sgl-kernel's backend without sgl-kernel: what it takes, and what it hands over."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch

from torch_ops.declarations import catalogue
from torch_ops.once import KernelLoadError

from . import examples
from .arguments import FULL, HALF, big, off, rope_args, strided, t
from .model_sgl_kernel import Model
from .test_platforms import SERVED


def refusal(op: str, *args: Any) -> str | None:
    return examples.refusal(op, "sgl_kernel", *args)


def run(op: str, *args: Any) -> Any:
    return examples.loaded(op, "sgl_kernel").function(*args)


@pytest.mark.parametrize("op", SERVED["sgl_kernel"])
def test_signatures_without_the_package(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    kernel = examples.loaded(op, "sgl_kernel")
    declared = inspect.signature(catalogue()[op].reference)
    found = inspect.signature(kernel.function)
    assert [(p.name, p.default) for p in found.parameters.values()] == [
        (p.name, p.default) for p in declared.parameters.values()
    ]
    assert kernel.supports is not None


x, w = t(3, 64, dtype=FULL), t(64, dtype=FULL)
FUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "dtype": (
        (x.double(), x.double(), w.double()), "x dtype torch.float64 (supported: torch.float32)",
    ),
    "weight dtype": (
        (x, x, w.half()),
        "weight dtype torch.float16 (supported: torch.float32, that of x); convert the weight",
    ),
    "width": (
        (*[big(3, 24577, dtype=FULL)] * 2, big(24577, dtype=FULL)),
        "rows of 24577 (supported: up to 24576, kept in shared memory)",
    ),
    "offsets": (
        (*[big(2**26 + 1, 64, dtype=FULL)] * 2, big(64, dtype=FULL)),
        f"x of {2**32 + 64} elements (supported: up to {2**32}, offsets are 32 bits wide)",
    ),
    "strides": (
        (x, strided(x, 80, 1), w),
        "residual strides (80, 1) for shape [3, 64] (supported: contiguous)",
    ),
    "pointer": ((off(x), x, w), "x is aligned to 4 bytes (supported: 16, for rows of 64)"),
    "weight pointer": (
        (x[:, :62].contiguous(), x[:, :62].contiguous(), off(w[:62])),
        "weight is aligned to 4 bytes (supported: 8, for rows of 62)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", ["fused_add_rms_norm", "fused_add_rms_norm_"])
@pytest.mark.parametrize(("args", "reason"), FUSED.values(), ids=FUSED)
def test_fused_add_refuses(op: str, args: tuple[Any, ...], reason: str) -> None:
    assert refusal(op, *args) == reason


@pytest.mark.parametrize("op", ["fused_add_rms_norm", "fused_add_rms_norm_"])
def test_fused_add_takes(op: str) -> None:
    odd = off(t(3, 63, dtype=FULL))
    for args in ((x, x, w), (x[0], x[0], w), (x[:0], x[:0], w), (odd, odd, off(w[:63]))):
        assert refusal(op, *args) is None


Q, K, CACHE, POSITIONS, _ = rope_args(dtype=FULL)
ROPES: dict[str, tuple[tuple[Any, ...], str]] = {
    "dtype": (
        rope_args(dtype=HALF),
        "q dtype torch.float16 (supported: torch.float32; the cosines and sines would be of that "
        "dtype, the op's contract: float32)",
    ),
    "positions dtype": (
        (Q, K, CACHE, POSITIONS.int()), "positions dtype torch.int32 (supported: torch.int64)",
    ),
    "no heads": (
        rope_args(heads=(4, 0), dtype=FULL), "no heads (supported: at least one)",
    ),
    "heads": (
        rope_args(heads=(4, 3), dtype=FULL),
        "3 heads of k (supported: divisors of the 4 heads of q)",
    ),
    "nothing to rotate": (
        rope_args(rotary_dim=0, dtype=FULL), "rotary_dim 0 (supported: at least 2)",
    ),
    "cache strides": (
        (Q, K, torch.empty(10, 128)[:, :64], POSITIONS),
        "cos_sin_cache strides (128, 1), positions strides (1,) (supported: contiguous)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", ["apply_rope", "apply_rope_"])
@pytest.mark.parametrize(("args", "reason"), ROPES.values(), ids=ROPES)
def test_rope_refuses(op: str, args: tuple[Any, ...], reason: str) -> None:
    assert refusal(op, *args) == reason


def test_rope_in_place_takes_one_distance_of_heads() -> None:
    packed = t(3, 2, 128, dtype=FULL)[..., :64]
    assert refusal("apply_rope", Q, packed, CACHE, POSITIONS) is None
    assert refusal("apply_rope_", Q, packed, CACHE, POSITIONS) == (
        "k strides (256, 128, 1) for shape [3, 2, 64] "
        "(supported: (64, 1) for the last two axes, as q)"
    )
    assert refusal("apply_rope_", Q, packed[:, :1], CACHE, POSITIONS) is None
    every_second = t(3, 4, 128, dtype=FULL)[..., ::2]
    assert refusal("apply_rope_", every_second, K, CACHE, POSITIONS) == (
        "q strides (512, 128, 2) for shape [3, 4, 64] (supported: 1 for the last axis)"
    )


def test_what_groups_it_takes() -> None:
    op, x = "quantize_fp8_per_group", t(3, 256)
    assert refusal(op, x, 64) is None
    assert refusal(op, t(0, 256), 64) is None
    assert refusal(op, x, 256) == "group_size 256 (supported: 16, 32, 64, 128)"
    assert refusal(op, x[:, :128], 128) == (
        "x strides (256, 1) for shape [3, 128] (supported: contiguous)"
    )
    assert refusal(op, off(x)) == "x is aligned to 2 bytes (supported: 16)"
    assert refusal(op, big(2**24 + 1, 128)) == (
        f"x of {2**31 + 128} elements (supported: up to {2**31}, offsets are 32 bits wide)"
    )


def test_arguments(sgl_kernel: Model) -> None:
    rows, weight = torch.randn(2, 3, 64), torch.randn(64)
    run("rms_norm", rows.half(), weight.half(), 0.5)
    run("gemma_rms_norm", rows.half(), weight.half())
    run("fused_add_rms_norm", rows, rows, weight, 0.25)
    run("silu_and_mul", rows)
    run("gelu_and_mul", rows)
    run("apply_rope", *rope_args(dtype=FULL, neox=False))
    run("quantize_fp8_per_group", rows.half(), 32)
    assert sgl_kernel.called == [
        ("rmsnorm", 0.5, False),
        ("gemma_rmsnorm", 1e-6, False),
        ("fused_add_rmsnorm", 0.25, False),
        ("silu_and_mul",),
        ("gelu_and_mul",),
        ("rotary_embedding", False),
        ("sgl_per_token_group_quant_8bit_v2", 32),
    ]


def test_nothing_is_loaded_for_nothing(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    none = t(0, 64, dtype=FULL)
    run("rms_norm", t(0, 64), t(64))
    run("fused_add_rms_norm_", none, none, w)
    run("silu_and_mul", t(3, 0))
    run("quantize_fp8_per_group", t(0, 128))
    run("apply_rope", *rope_args(tokens=0, dtype=FULL))
    run("merge_state", t(0, 2, 64), t(0, 2, dtype=FULL), t(0, 2, 64), t(0, 2, dtype=FULL))
    run("topk_softmax", t(0, 8), 2)


def test_a_library_that_does_not_load(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    for op, args in (("rms_norm", (t(3, 64), t(64))), ("silu_and_mul", (t(3, 64),))):
        with pytest.raises(KernelLoadError, match="sgl-kernel's library: ModuleNotFoundError: "):
            run(op, *args)
