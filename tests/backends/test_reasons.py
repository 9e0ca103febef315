"""Which calls the two backends take, and why they refuse others: value received, and limit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops
from torch_ops import Platform

from . import examples
from .arguments import BRAIN, FULL, HALF, big, off, strided, t

BOTH = ("flashinfer", "sgl_kernel")
HALVES = "torch.float16, torch.bfloat16"
w = t(64)
OFFSETS = 2**32
NORMS: dict[str, tuple[tuple[Any, ...], str]] = {
    "dtype": ((t(3, 64, dtype=FULL), w), f"x dtype torch.float32 (supported: {HALVES})"),
    "weight dtype": (
        (t(3, 64), t(64, dtype=FULL)),
        "weight dtype torch.float32 (supported: torch.float16, that of x); convert the weight",
    ),
    "weight strides": (
        (t(3, 64), t(128)[::2]), "weight strides (2,) for shape [64] (supported: 1)",
    ),
    "transposed": (
        (t(64, 3).T, w),
        "x strides (1, 3) for shape [3, 64] "
        "(supported: 1 for the last axis, rows at one distance from each other)",
    ),
    "irregular rows": (
        (strided(t(2, 3, 64), 1024, 64, 1), w),
        "x strides (1024, 64, 1) for shape [2, 3, 64] "
        "(supported: 1 for the last axis, rows at one distance from each other)",
    ),
    "pointer": ((off(t(3, 64)), w), "x is aligned to 2 bytes (supported: 16, for rows of 64)"),
    "pointer of 4 bytes": (
        (off(t(3, 36), 2), t(36)), "x is aligned to 4 bytes (supported: 8, for rows of 36)",
    ),
    "weight pointer": (
        (t(3, 64), off(w)), "weight is aligned to 2 bytes (supported: 16, for rows of 64)",
    ),
    "pitch": (
        (strided(t(3, 64), 68, 1), w),
        "x has 68 elements from row to row (supported: multiples of 8, for rows of 64)",
    ),
    "offsets": (
        (big(2**27, 64), big(64)),
        f"x spans {2**33} elements (supported: up to {OFFSETS}, offsets are 32 bits wide)",
    ),
    "offsets of rows": (
        (big(3, 2**32)[:, :64], big(64)),
        f"x spans {2**33 + 64} elements (supported: up to {OFFSETS}, offsets are 32 bits wide)",
    ),
}  # fmt: skip
NORMS_TAKEN: dict[str, tuple[Any, ...]] = {
    "rows": (t(3, 64), w),
    "bfloat16": (t(3, 64, dtype=BRAIN), t(64, dtype=BRAIN)),
    "a vector": (t(64), w),
    "many axes": (t(2, 3, 5, 64), w),
    "odd rows": (off(t(3, 63)), off(t(63))),
    "rows of one element": (t(5, 1), t(1)),
    "pitch": (strided(t(3, 64), 72, 1), w),
    "odd pitch of odd rows": (strided(t(3, 63), 67, 1), t(63)),
    "no rows": (t(0, 64), w),
    "empty rows": (t(3, 0), t(0)),
    "no rows, strided": (t(0, 128)[:, ::2], w),
    "one row far away": (strided(t(1, 64), 2**40, 1), w),
    "at the limit": (big(2**26, 64), big(64)),
}


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("op", ["rms_norm", "gemma_rms_norm"])
@pytest.mark.parametrize(("args", "reason"), NORMS.values(), ids=NORMS)
def test_norms_refuse(backend: str, op: str, args: tuple[Any, ...], reason: str) -> None:
    assert examples.refusal(op, backend, *args) == reason


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("op", ["rms_norm", "gemma_rms_norm"])
@pytest.mark.parametrize("args", NORMS_TAKEN.values(), ids=NORMS_TAKEN)
def test_norms_take(backend: str, op: str, args: tuple[Any, ...]) -> None:
    assert examples.refusal(op, backend, *args) is None


@pytest.mark.parametrize("backend", BOTH)
def test_a_weight_is_required(backend: str) -> None:
    for args in ((t(3, 64),), (t(3, 64), None), (t(3, 64), None, 1e-5)):
        assert examples.refusal("rms_norm", backend, *args) == (
            "weight None (required by the kernel)"
        )


GATES: dict[str, tuple[Tensor, str]] = {
    "width": (t(3, 24), "x of width 24 (supported: multiples of 16 in torch.float16)"),
    "strides": (
        t(3, 256)[:, :128], "x strides (256, 1) for shape [3, 128] (supported: contiguous)",
    ),
    "pointer": (off(t(3, 32)), "x is aligned to 2 bytes (supported: 16)"),
}  # fmt: skip


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize(("x", "reason"), GATES.values(), ids=GATES)
def test_gates_refuse(backend: str, op: str, x: Tensor, reason: str) -> None:
    assert examples.refusal(op, backend, x) == reason


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul"])
def test_gates_take(backend: str, op: str) -> None:
    taken = [
        t(3, 32),
        t(32),
        t(2, 3, 4, 32),
        t(0, 6),
        t(3, 0),
        t(0, 64)[:, :6],
        t(3, 32).bfloat16(),
    ]
    for x in taken:
        assert examples.refusal(op, backend, x) is None


def test_gates_in_float32() -> None:
    x = t(3, 8, dtype=FULL)
    assert examples.refusal("silu_and_mul", "sgl_kernel", x) is None
    assert examples.refusal("silu_and_mul", "flashinfer", x) == (
        f"x dtype torch.float32 (supported: {HALVES})"
    )
    assert examples.refusal("silu_and_mul", "sgl_kernel", x[:, :4]) == (
        "x of width 4 (supported: multiples of 8 in torch.float32)"
    )


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize(
    "op", ["fused_add_rms_norm", "fused_add_rms_norm_", "gemma_fused_add_rms_norm"]
)
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_the_norm_of_an_unrounded_sum_is_refused(backend: str, op: str, dtype: torch.dtype) -> None:
    args = (t(3, 64, dtype=dtype), t(3, 64, dtype=dtype), t(64, dtype=dtype))
    assert examples.refusal(op, backend, *args) == (
        f"x dtype {dtype}: the norm is of x + residual before the sum is rounded "
        "(the op's contract: norm_of_rounded)"
    )


@pytest.mark.parametrize("backend", BOTH)
def test_approximate_tanh_is_refused(backend: str) -> None:
    reason = examples.refusal("gelu_tanh_and_mul", backend, t(3, 32))
    assert reason is not None
    assert reason.startswith("tanh has a relative error of 2**-11")
    assert reason.endswith("(the op's contract: float32)")


@pytest.mark.parametrize("backend", BOTH)
def test_merging_that_reads_empty_parts_is_refused(backend: str) -> None:
    v, s = t(3, 2, 64), t(3, 2, dtype=FULL)
    assert examples.refusal("merge_state", backend, v, s, v, s) == (
        "parts without keys give NaN, and their values are read (the op's contract: zeros and "
        "-inf where both are empty, values of an empty part never read)"
    )
    assert "v_a dtype torch.float64" in str(
        examples.refusal("merge_state", backend, v.double(), s, v.double(), s)
    )


def test_ranking_probabilities_is_refused() -> None:
    assert examples.refusal("topk_softmax", "sgl_kernel", t(3, 8), 2) == (
        "a row with NaN gives an expert more than once, and equal probabilities aren't ordered by "
        "their logits (the op's contract: distinct ids, ordered by logits)"
    )
    reason = examples.refusal("topk_softmax", "sgl_kernel", t(3, 8).double(), 2)
    assert str(reason).startswith("logits dtype torch.float64 (supported: torch.float32, ")


@pytest.mark.usefixtures("installed")
def test_explanations_carry_the_reasons() -> None:
    x = t(3, 64, dtype=FULL)
    told = torch_ops.explain("rms_norm", x, x[0], platform=Platform.cuda((9, 0)))
    reasons = {candidate.backend.value: candidate.reasons for candidate in told.candidates}
    for backend in BOTH:
        assert reasons[backend] == (f"x dtype torch.float32 (supported: {HALVES})",)


def test_a_compiler_is_looked_for_once_until_something_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    found = {"g++": "/usr/bin/g++"}

    def which(name: str, **_: Any) -> str | None:
        asked.append(name)
        return found.get(name)

    monkeypatch.setattr(shutil, "which", which)
    monkeypatch.setenv("CXX", "c++-77")
    call = ("rms_norm", "inductor", torch.zeros(3, 64), torch.ones(64))
    torch_ops.refresh()
    assert [examples.refusal(*call) for _ in range(3)] == [None] * 3
    assert asked == ["c++-77", "g++"]
    found.clear()
    assert examples.refusal(*call) is None
    torch_ops.refresh()
    wanted = "no C++ compiler found (looked for $CXX, g++, clang++); install g++"
    assert examples.refusal(*call) == wanted
    found["g++"] = "/usr/bin/g++"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert examples.refusal(*call) is None
