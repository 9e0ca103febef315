"""Calls through the ops on models of both packages, on a CPU that says it is a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ops
from torch_ops import Backend, BackendUnavailableError, Platform, ops, policy
from torch_ops.attention import Attention, AttentionBackend, override_attention_backend
from torch_ops.declarations import catalogue

from . import sites
from .arguments import dense

BOTH = ("flashinfer", "sgl_kernel")
X, W = torch.randn(3, 64).bfloat16(), torch.randn(64).bfloat16()


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark that compiles ahead; benchmarks aren't installed."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    return importlib.import_module("benchmarks.warm_flashinfer")


@pytest.fixture
def pretended(
    tmp_path: Path, flashinfer: Any, sgl_kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """Both packages are installed, and every tensor counts as one on a Hopper GPU."""
    for backend in sites.PACKAGES:
        sites.install(tmp_path, backend)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(Platform, "detect", lambda device=None: Platform.cuda((9, 0)))
    torch_ops.refresh()
    policy.invalidate()
    yield {"flashinfer": flashinfer, "sgl_kernel": sgl_kernel}
    monkeypatch.undo()
    torch_ops.refresh()
    policy.invalidate()


def prefer(monkeypatch: pytest.MonkeyPatch, op: str, *backends: str) -> None:
    monkeypatch.setitem(catalogue()[op].order, "cuda", backends)
    policy.invalidate()


def state(op: str, backend: str) -> str:
    (found,) = [c for c in torch_ops.explain(op).candidates if c.backend == backend]
    return found.state


@pytest.mark.parametrize("backend", BOTH)
def test_by_name(pretended: dict[str, Any], backend: str) -> None:
    got = ops.rms_norm(X, W, backend=backend)
    torch.testing.assert_close(got, ops.rms_norm(X, W, backend="torch"))
    assert pretended[backend].called == [("rmsnorm", 1e-6, False)]
    assert state("rms_norm", backend) == "verified"
    with pytest.raises(BackendUnavailableError) as raised:
        ops.rms_norm(X.float(), W.float(), backend=backend)
    assert raised.value.reasons == (
        "x dtype torch.float32 (supported: torch.float16, torch.bfloat16)",
    )


def test_by_declared_order(pretended: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, "rms_norm", "sgl_kernel", "flashinfer", "torch")
    with torch_ops.trace() as seen:
        ops.rms_norm(X, W)
        ops.rms_norm(X.float(), W.float())
    assert [record.backend for record in seen.records] == [Backend.SGL_KERNEL, Backend.TORCH]


def test_what_does_not_compile_goes_to_the_next(
    pretended: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(monkeypatch, "silu_and_mul", "flashinfer", "sgl_kernel", "torch")
    pretended["flashinfer"].broken["silu_and_mul"] = RuntimeError("Could not find nvcc")
    reason = "FlashInfer's silu_and_mul: RuntimeError: Could not find nvcc"
    with torch_ops.trace() as seen:
        for _ in range(3):
            ops.silu_and_mul(X)
    assert {record.backend for record in seen.records} == {Backend.SGL_KERNEL}
    assert state("silu_and_mul", "flashinfer") == "failed"
    assert state("rms_norm", "flashinfer") != "failed"
    with pytest.raises(BackendUnavailableError, match=reason):
        ops.silu_and_mul(X, backend="flashinfer")
    assert pretended["flashinfer"].built == ["silu_and_mul"]
    assert reason in str(torch_ops.explain("silu_and_mul", X))


@pytest.mark.parametrize("member", ["flashinfer_fa2", "flashinfer_fa3"])
def test_layers(pretended: dict[str, Any], monkeypatch: pytest.MonkeyPatch, member: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    layer = Attention(4, 64, 2, is_causal=True, backend="torch_math")
    q, k, v = dense(batch=2)
    expected = layer(q, k, v)
    with override_attention_backend(layer, member):
        got = layer(q, k, v)
        assert layer.backend is AttentionBackend(member)
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)
    family = member.removeprefix("flashinfer_")
    ran = {call[1] for call in pretended["flashinfer"].called}
    assert family in ran


def test_what_is_compiled_ahead(
    pretended: dict[str, Any], warm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jobs of `benchmarks.warm_flashinfer` compile every module that a call needs."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    setup = warm._SETUP.replace('device="cuda"', 'device="cpu"')
    for job in warm.jobs(everything=True):
        exec(f"{setup}\n{job.code}", {})
    built = set(pretended["flashinfer"].built)
    rows = {"norm", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "rope", "cascade", "gemm"}
    prefills = {
        f"{kind} {family} {head_dim} {windowed}"
        for kind in ("single", "batch")
        for family in ("fa2", "fa3")
        for head_dim in (64, 128, 256)
        for windowed in (True, False)
    }
    latents = {"mla fa3"}
    assert built == rows | prefills | latents
    few = {job.name for job in warm.jobs()}
    assert few < {job.name for job in warm.jobs(everything=True)}


def test_a_job_that_fails_is_told_with_its_error(warm: Any) -> None:
    job = warm.Job("wrong", "raise RuntimeError('Could not find nvcc')")
    result = warm._compile(job)
    assert result["name"] == "wrong"
    assert "RuntimeError: Could not find nvcc" in result["error"]
    report = {"jobs": [result], "seconds": 1.0, "workers": 1}
    assert "0 of 1 compiled" in warm.table(report)
    assert "Could not find nvcc" in warm.table(report)
