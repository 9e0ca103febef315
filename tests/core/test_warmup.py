"""`warmup`: loads, compiles and launches ahead of the call, and leaves the arguments alone."""

from __future__ import annotations

import logging

import pytest
import torch

import torch_ops
from torch_ops import (
    Backend,
    BackendUnavailableError,
    CaptureError,
    KernelSpec,
    Platform,
    UnknownBackendError,
    UnknownOpError,
)

from .toy import Toy


def state(backend: str) -> str:
    explained = torch_ops.explain("toy", platform=Platform.cpu())
    return {c.backend.value: c.state for c in explained.candidates}[backend]


def test_it_runs_what_a_call_would_run(toy: Toy, caplog: pytest.LogCaptureFixture) -> None:
    toy.serve("torch", 1)
    toy.serve("triton", 3)
    x = torch.ones(2, requires_grad=True)
    with caplog.at_level(logging.INFO, "torch_ops"):
        torch_ops.warmup("toy", x)
    assert toy.calls == {"torch": 1}
    assert state("torch") == "verified"
    assert "warmup of op 'toy' took" in caplog.text
    for backend in ("triton", Backend.TRITON):
        torch_ops.warmup("toy", x, 2, backend=backend)
    with torch_ops.use_backend("triton"):
        torch_ops.warmup("toy", x)
    assert toy.calls == {"torch": 1, "triton": 3}


def test_arguments_are_left_alone() -> None:
    x, residual, weight = torch.randn(2, 8), torch.randn(2, 8), torch.randn(8)
    before = [t.clone() for t in (x, residual, weight)]
    versions = [t._version for t in (x, residual, weight)]
    torch_ops.warmup("fused_add_rms_norm_", x, residual, weight, backend="torch")
    for tensor, copy, version in zip((x, residual, weight), before, versions, strict=True):
        assert tensor.equal(copy)
        assert tensor._version == version


def test_it_raises_what_the_call_would(toy: Toy) -> None:
    toy.serve("torch", 1, supports=lambda x, n: "n is odd (supported: even n)" if n % 2 else None)
    with pytest.raises(BackendUnavailableError, match="n is odd"):
        torch_ops.warmup("toy", torch.ones(2), backend="torch")
    with pytest.raises(UnknownBackendError, match="No 'triton' backend registered for op 'toy'"):
        torch_ops.warmup("toy", torch.ones(2), backend="triton")
    with pytest.raises(ValueError, match="op 'toy': argument 'n' is -1"):
        torch_ops.warmup("toy", torch.ones(2), -1)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        torch_ops.warmup("toy")
    with pytest.raises(UnknownOpError, match="No kernels registered for op 'tyo'"):
        torch_ops.warmup("tyo")


def test_ops_that_are_only_registered_have_no_operator_to_run() -> None:
    torch_ops.register_kernel(KernelSpec("loose", "torch", "math:sqrt"))
    with pytest.raises(UnknownOpError, match="op 'loose' is only registered, not declared"):
        torch_ops.warmup("loose", 4.0)


def test_never_during_a_capture(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a kernel loaded then: the text says to prepare first."""
    toy.serve("torch", 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="warmup of op 'toy': a stream is capturing"):
        torch_ops.warmup("toy", torch.ones(2))
    with pytest.raises(CaptureError, match=r"op 'toy', backend 'torch': not loaded.*prepare first"):
        toy()
    assert not toy.calls
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert toy() == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert toy() == 1


def test_never_inside_traced_code(toy: Toy) -> None:
    toy.serve("torch", 1)

    def warmed(x: torch.Tensor) -> torch.Tensor:
        torch_ops.warmup("toy", x)
        return x

    compiled = torch.compile(warmed, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"warmup of op 'toy': .* code is being traced"):
        compiled(torch.ones(2))
