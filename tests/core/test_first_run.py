"""Kernels that can be imported and then not be loaded or compiled: sticky and explained."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_ops
from torch_ops import (
    Backend,
    BackendUnavailableError,
    CaptureError,
    kernels,
    ops,
    policy,
    selector,
)
from torch_ops import once as first_use
from torch_ops.attention import Attention, AttentionBackend, choice, override_attention_backend
from torch_ops.declarations import catalogue
from torch_ops.errors import AttentionOverrideError
from torch_ops.once import KernelLoadError

from .conftest import Install

NO_COMPILER = RuntimeError("Could not find nvcc")
X, WEIGHT = torch.randn(3, 8), torch.randn(8)


@pytest.fixture
def late(install: Install) -> Iterator[Any]:
    """The installed backend; what it fails at and what it has built is forgotten afterwards."""
    install("late")
    yield importlib.import_module("torch_ops_late")
    for key in [key for key in first_use._made if isinstance(key, tuple) and key[0] == "late"]:
        del first_use._made[key]
    for spec in [spec for spec in kernels._kernels if spec.backend == "late"]:
        del kernels._kernels[spec]
    torch_ops.refresh()


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the backend first in the declared order of two ops on a CPU."""
    for op in ("rms_norm", "silu_and_mul"):
        monkeypatch.setitem(catalogue()[op].order, "cpu", ("late", "torch"))
    monkeypatch.setitem(choice.ORDER, "cpu", ("late", "torch_math"))
    policy.invalidate()


def state(op: str) -> str:
    (candidate,) = [c for c in torch_ops.explain(op).candidates if c.backend == "late"]
    return candidate.state


@pytest.mark.parametrize("source", ["call", "scope"])
def test_explicit_choice_raises_with_type_and_text(late: Any, source: str) -> None:
    late.broken["norm for torch.float32"] = NO_COMPILER
    scope = torch_ops.use_backend(rms_norm="late") if source == "scope" else torch_ops.use_backend()
    for _ in range(3):
        with scope, pytest.raises(BackendUnavailableError) as raised:
            ops.rms_norm(X, WEIGHT, backend="late" if source == "call" else None)
        (reason,) = raised.value.reasons
        assert reason == (
            "loading it failed: late's norm for torch.float32: RuntimeError: Could not find nvcc"
        )
        assert f"chosen by {source}" in str(raised.value)
    assert late.built["norm for torch.float32"] == 1
    assert state("rms_norm") == "failed"


def test_automatic_choice_goes_on(late: Any, preferred: None) -> None:
    late.broken["norm for torch.float32"] = NO_COMPILER
    with torch_ops.trace() as seen:
        for _ in range(3):
            assert torch.equal(ops.rms_norm(X, WEIGHT), ops.rms_norm(X, WEIGHT, backend="torch"))
    reasons = {r.backend: r.skipped for r in seen.records if r.source == "declared"}
    assert set(reasons) == {Backend.TORCH}
    assert "RuntimeError: Could not find nvcc" in str(reasons)
    assert late.built["norm for torch.float32"] == 1
    assert torch_ops.explain("rms_norm").chosen is Backend.TORCH
    assert "loading it failed: late's norm for torch.float32" in str(torch_ops.explain("rms_norm"))


def test_refresh_tries_again(late: Any, preferred: None) -> None:
    late.broken["norm for torch.float32"] = NO_COMPILER
    ops.rms_norm(X, WEIGHT)
    late.broken.clear()
    ops.rms_norm(X, WEIGHT)
    assert late.built["norm for torch.float32"] == 1
    torch_ops.refresh()
    with torch_ops.trace() as seen:
        ops.rms_norm(X, WEIGHT)
    assert [record.backend for record in seen.records] == ["late"]
    assert late.built["norm for torch.float32"] == 2
    assert state("rms_norm") == "verified"


def test_other_ops_of_the_backend_go_on(late: Any) -> None:
    late.broken["norm for torch.float32"] = NO_COMPILER
    with pytest.raises(BackendUnavailableError):
        ops.rms_norm(X, WEIGHT, backend="late")
    ops.silu_and_mul(X, backend="late")
    assert state("silu_and_mul") == "verified"


def test_a_variant_that_fails_leaves_those_that_ran(late: Any, preferred: None) -> None:
    late.broken["norm for torch.float64"] = NO_COMPILER
    wide, wide_weight = X.double(), WEIGHT.double()
    ops.rms_norm(X, WEIGHT)
    with torch_ops.trace() as seen:
        for _ in range(3):
            ops.rms_norm(wide, wide_weight)
            ops.rms_norm(X, WEIGHT)
    assert [(r.backend, r.count) for r in seen.records] == [(Backend.TORCH, 3), ("late", 3)]
    assert late.built == {"norm for torch.float32": 1, "norm for torch.float64": 1}
    assert state("rms_norm") == "verified"
    with pytest.raises(BackendUnavailableError, match=r"norm for torch\.float64: RuntimeError"):
        ops.rms_norm(wide, wide_weight, backend="late")


def test_error_of_a_run_propagates_and_changes_nothing(late: Any, preferred: None) -> None:
    late.broken["launch"] = RuntimeError("an illegal memory access was encountered")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            ops.silu_and_mul(X)
    assert state("silu_and_mul") == "imported"


@pytest.mark.parametrize(
    "text",
    [
        "RMSNorm failed with error code no kernel image is available for execution on the device",
        "CUDA error: CUDA driver version is insufficient for CUDA runtime version",
        "the provided PTX was compiled with an unsupported toolchain.",
    ],
)
def test_code_that_the_driver_refuses_is_a_failure_to_load(
    late: Any, preferred: None, text: str
) -> None:
    late.broken["launch"] = RuntimeError(text)
    with torch_ops.trace() as seen:
        ops.silu_and_mul(X)
    assert [(r.backend, text in str(r.skipped)) for r in seen.records] == [(Backend.TORCH, True)]
    assert state("silu_and_mul") == "failed"
    late.broken.clear()
    torch_ops.refresh()
    ops.silu_and_mul(X)
    late.broken["launch"] = RuntimeError(text)
    with pytest.raises(RuntimeError, match=text):
        ops.silu_and_mul(X)
    assert state("silu_and_mul") == "verified"


def test_compiled_once_by_many_threads(late: Any) -> None:
    ready = threading.Barrier(16)
    results = []

    def call() -> None:
        ready.wait()
        results.append(ops.rms_norm(X, WEIGHT, backend="late"))

    threads = [threading.Thread(target=call) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert late.built["norm for torch.float32"] == 1
    assert len(results) == 16
    assert all(torch.equal(result, results[0]) for result in results)


def test_nothing_is_compiled_in_a_capture(late: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_ops.get_kernel("rms_norm", "late")
    monkeypatch.setattr(first_use, "capturing", lambda: True)
    with pytest.raises(CaptureError, match=r"late's norm for torch.float32 isn't loaded.*warmup"):
        ops.rms_norm(X, WEIGHT, backend="late")
    assert late.built == {}
    monkeypatch.undo()
    ops.rms_norm(X, WEIGHT, backend="late")


def test_text_is_kept_short_at_both_ends(late: Any) -> None:
    late.broken["norm for torch.float32"] = RuntimeError("first " + "x" * 10**6 + " last")
    with pytest.raises(BackendUnavailableError) as raised:
        ops.rms_norm(X, WEIGHT, backend="late")
    (reason,) = raised.value.reasons
    assert len(reason) < 3000
    assert "RuntimeError: first x" in reason
    assert reason.endswith("x last")


def test_plan_with_a_kernel_that_always_refuses_is_made_once(
    late: Any, preferred: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []
    make = selector.make_plan

    def counted(*args: Any, **kwargs: Any) -> selector.Plan:
        plans.append(args)
        return make(*args, **kwargs)

    monkeypatch.setattr(selector, "make_plan", counted)
    for _ in range(5):
        ops.rms_norm(X.view(3, 2, 4), None)
    assert len(plans) == 1


def test_layers_go_on_to_the_next_family(late: Any, preferred: None) -> None:
    late.broken["prefill"] = NO_COMPILER
    layer = Attention(2, 8)
    q = torch.randn(1, 3, 2, 8)
    with torch_ops.trace() as seen:
        layer(q, q, q)
        layer(q, q, q)
    (record,) = seen.records
    assert record.backend == AttentionBackend.TORCH_MATH
    assert "loading it failed: late's prefill: RuntimeError: Could not find nvcc" in str(
        record.skipped
    )
    assert late.built["prefill"] == 1
    late.broken.clear()
    torch_ops.refresh()
    with torch_ops.trace() as seen:
        layer(q, q, q)
    assert [record.backend for record in seen.records] == [AttentionBackend("late")]


def test_layer_that_was_asked_for_the_family_raises(late: Any) -> None:
    late.broken["prefill"] = NO_COMPILER
    layer = Attention(2, 8, backend="late")
    q = torch.randn(1, 3, 2, 8)
    for _ in range(2):
        with pytest.raises(BackendUnavailableError, match="RuntimeError: Could not find nvcc"):
            layer(q, q, q)
    other = Attention(2, 8)
    other(q, q, q)
    with pytest.raises(AttentionOverrideError, match="RuntimeError: Could not find nvcc"):
        override_attention_backend(other, "late")
    assert other.backend is not AttentionBackend("late")
    assert late.built["prefill"] == 1


def test_once_keeps_the_cause() -> None:
    def build() -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    with pytest.raises(KernelLoadError, match="a library: OSError: libcudart") as raised:
        first_use.once(("test", "library"), "a library", build)
    assert isinstance(raised.value.__cause__, OSError)
    assert first_use.failure(("test", "library")) == str(raised.value)
    first_use.forget_failures()
    assert first_use.failure(("test", "library")) is None
