"""The selector: which kernel may run, and every phrase with which it refuses."""

from __future__ import annotations

import logging
import math
import sys

import pytest
import torch
from torch import Tensor

import torch_ops
from torch_ops import (
    AmbiguousBackendError,
    Backend,
    BackendUnavailableError,
    KernelSpec,
    NoBackendError,
    Platform,
    Requirement,
    UnknownBackendError,
    UnknownOpError,
    ops,
)

from .toy import Toy

CPU = Platform.cpu()
H200 = Platform.cuda((9, 0))
MI300 = Platform.rocm("gfx942")


def register(backend: str, *requires: Requirement, target: str = "math:sqrt") -> KernelSpec:
    """A kernel of an op that is only registered."""
    return torch_ops.register_kernel(KernelSpec("loose", backend, target, requires))


@pytest.mark.parametrize("op", ["rms_nrom", "RMS_NORM", "", "x y", None, 5])
def test_unknown_op(op: str) -> None:
    for use in (torch_ops.select_kernel, torch_ops.get_kernel, torch_ops.explain):
        with pytest.raises(UnknownOpError) as raised:
            use(op)
        assert str(raised.value).startswith(f"No kernels registered for op {op!r}. Known: ")
        assert "'rms_norm'" in str(raised.value)
        assert raised.value.op == op
    with pytest.raises(UnknownOpError, match=r"Did you mean 'rms_norm'\?"):
        torch_ops.select_kernel("rms_nrom")


def test_unknown_backend() -> None:
    for backend in ("tritn", Backend.AITER):
        with pytest.raises(UnknownBackendError) as raised:
            torch_ops.select_kernel("merge_state", backend, platform=CPU)
        assert f"No '{backend}' backend registered for op 'merge_state'" in str(raised.value)
        assert "Registered: " in str(raised.value)
        assert "'torch'" in str(raised.value)


def test_the_only_kernel_of_a_registered_op() -> None:
    """It is checked for eligibility like any other."""
    spec = register("triton")
    assert torch_ops.select_kernel("loose", platform=CPU) is spec
    torch_ops.registry.unregister(spec)
    register("triton", Requirement.cuda())
    assert torch_ops.select_kernel("loose", platform=H200).backend is Backend.TRITON
    with pytest.raises(NoBackendError, match="op 'loose' has no backend usable on device 'cpu'"):
        torch_ops.select_kernel("loose", platform=CPU)


def test_none_usable_gives_every_reason_of_every_candidate() -> None:
    register("triton", Requirement.cuda((9, 0)), Requirement.rocm(["gfx950"]))
    register("flashinfer", target="no_such_package_anywhere:f")
    register("aiter", Requirement.rocm(), target="no_such_package_either.sub:f")
    with pytest.raises(NoBackendError) as raised:
        torch_ops.select_kernel("loose", platform=Platform.cuda((8, 0)))
    message = str(raised.value)
    assert message.startswith("op 'loose' has no backend usable on device 'cuda'\n")
    assert "platform  cuda, sm_80" in message
    assert f"torch {torch.__version__}" in message
    for line in (
        "triton  ROCm only (device is 'cuda'); arch sm_80 is too old (supported: sm_90 and newer)",
        "flashinfer  not installed: no module named 'no_such_package_anywhere'",
        "aiter  ROCm only (device is 'cuda')",
        "aiter  not installed: no module named 'no_such_package_either'",
    ):
        assert f"    {line}\n" in message
    assert "Change what the reasons name, install or enable a backend" in message
    assert raised.value.op == "loose"
    judged = {c.backend.value: c for c in raised.value.candidates}
    assert set(judged) == {"triton", "flashinfer", "aiter"}
    assert not any(c.usable for c in judged.values())
    assert len(judged["aiter"].reasons) == 2


def test_several_usable_and_nothing_decides() -> None:
    register("triton", Requirement.cuda())
    register("flashinfer", Requirement.cuda((8, 0)))
    register("aiter", Requirement.rocm())
    with pytest.raises(AmbiguousBackendError) as raised:
        torch_ops.select_kernel("loose", platform=H200)
    message = str(raised.value)
    assert message.startswith("op 'loose' has multiple backends usable on device 'cuda': ")
    assert "'triton', 'flashinfer'; pass backend=... to choose one" in message
    assert "aiter  ROCm only (device is 'cuda')" in message
    assert {c.backend.value for c in raised.value.candidates if c.usable} == {
        "triton",
        "flashinfer",
    }
    assert torch_ops.select_kernel("loose", "flashinfer", platform=H200).backend == "flashinfer"
    assert torch_ops.select_kernel("loose", platform=MI300).backend is Backend.AITER
    with torch_ops.use_backend(loose="triton"):
        assert torch_ops.select_kernel("loose", platform=H200).backend is Backend.TRITON
    torch_ops.set_backend(loose="flashinfer")
    assert torch_ops.select_kernel("loose", platform=H200).backend == "flashinfer"


def test_explicit_one_not_usable() -> None:
    register("triton", Requirement.cuda((9, 0)))
    spec = register("flashinfer", Requirement.cuda(), target="no_such_package_anywhere:f")
    with pytest.raises(BackendUnavailableError) as raised:
        torch_ops.select_kernel("loose", "flashinfer", platform=CPU)
    message = str(raised.value)
    assert message.startswith("op 'loose': backend 'flashinfer', chosen by call, is not usable")
    reasons = (
        "CUDA only (device is 'cpu')",
        "not installed: no module named 'no_such_package_anywhere'",
    )
    assert raised.value.reasons == reasons
    assert (raised.value.op, raised.value.backend) == ("loose", "flashinfer")
    for reason in reasons:
        assert f"    flashinfer  {reason}\n" in message
    assert "choose another backend of 'loose' ('triton', 'flashinfer')" in message
    assert "unchecked=True" in message
    unchecked = torch_ops.select_kernel("loose", "flashinfer", platform=CPU, unchecked=True)
    assert unchecked is spec


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        (CPU, "torch"),
        (H200, "flashinfer"),
        (Platform.cuda((8, 0)), "flashinfer"),
        (Platform.cuda((7, 5)), "triton"),
        (Platform("cuda", None, 0, "?"), "torch"),
        (MI300, "aiter"),
        (Platform.rocm("gfx90a"), "torch"),
    ],
    ids=str,
)
def test_declared_order_by_platform(platform: Platform, expected: str, toy: Toy) -> None:
    """Pure in the platform: no such device is needed, and unknown is not eligible."""
    toy.serve("torch", 1)
    toy.serve("triton", 3, requires=[Requirement.cuda((7, 0))])
    toy.serve("flashinfer", 4, requires=[Requirement.cuda((8, 0))])
    toy.serve("aiter", 5, requires=[Requirement.rocm(["gfx942", "gfx950"])])
    toy.serve("sgl_kernel", 6)
    assert torch_ops.select_kernel("toy", platform=platform).backend == expected
    explained = torch_ops.explain("toy", platform=platform)
    assert explained.chosen == expected
    assert explained.source == "declared"


def test_a_backend_that_no_order_names_is_never_chosen(toy: Toy) -> None:
    toy.serve("sgl_kernel", 6)
    with pytest.raises(NoBackendError) as raised:
        toy()
    assert (
        "sgl_kernel  not in the declared order of 'toy' on cpu; choose it by "
        "backend='sgl_kernel' or torch_ops.use_backend(toy='sgl_kernel')"
    ) in str(raised.value)
    assert toy("sgl_kernel") == 6


def test_arguments_switch_the_checks_of_the_call_on(toy: Toy) -> None:
    toy.serve("torch", 1, supports=lambda x, n: f"n {n} (supported: up to 4)" if n > 4 else None)
    toy.serve("triton", 3)
    x = torch.ones(2)
    assert torch_ops.select_kernel("toy", platform=CPU).backend is Backend.TORCH
    assert torch_ops.select_kernel("toy", args=(x, 4)).backend is Backend.TORCH
    assert torch_ops.select_kernel("toy", args=(x, 5)).backend is Backend.TRITON
    with pytest.raises(BackendUnavailableError) as raised:
        torch_ops.select_kernel("toy", "torch", args=(x, 5))
    assert raised.value.reasons == ("n 5 (supported: up to 4)",)
    assert "call      x=float32[2]@cpu, n=5" in str(raised.value)
    assert torch_ops.select_kernel("toy", "torch", args=(x, 5), unchecked=True)
    assert torch_ops.select_kernel("toy", "torch", args=(x,))


def test_a_call_goes_to_the_first_that_takes_it(toy: Toy, caplog: pytest.LogCaptureFixture) -> None:
    """Automatic: the next in order, and it is told once. Explicit: the call raises."""
    toy.serve("torch", 1, supports=lambda x, n: "n is odd (supported: even n)" if n % 2 else None)
    toy.serve("inductor", 2, supports=lambda x, n: "n > 8 (supported: up to 8)" if n > 8 else None)
    with caplog.at_level(logging.INFO, "torch_ops"):
        assert [toy(n=n) for n in (2, 3, 10, 5, 2, 7)] == [1, 2, 1, 2, 1, 2]
    told = [record.getMessage() for record in caplog.records if "degraded" in record.getMessage()]
    assert told == ["degraded: op 'toy' skips backend 'torch': n is odd (supported: even n)"]
    with pytest.raises(NoBackendError) as raised:
        toy(n=9)
    message = str(raised.value)
    assert "call      x=float32[2, 3]@cpu, n=9" in message
    assert "torch  n is odd (supported: even n)" in message
    assert "inductor  n > 8 (supported: up to 8)" in message
    with pytest.raises(BackendUnavailableError, match="n is odd"):
        toy("torch", n=3)
    assert toy("torch", n=2) == 1
    assert toy.calls == {"torch": 4, "inductor": 3}


def test_skipping_at_selection_is_told_once(toy: Toy, caplog: pytest.LogCaptureFixture) -> None:
    toy.serve("torch", 1, requires=[Requirement.cuda()])
    toy.serve("triton", 3)
    with caplog.at_level(logging.INFO, "torch_ops"):
        for _ in range(3):
            assert toy() == 3
            torch_ops.set_backend(rms_norm="torch")()
    told = [record.getMessage() for record in caplog.records if "degraded" in record.getMessage()]
    assert told == ["degraded: op 'toy' skips backend 'torch': CUDA only (device is 'cpu')"]


def test_an_error_of_a_kernel_is_not_another_kernels_turn(toy: Toy) -> None:
    """What a kernel raises after it has started propagates, whatever its class."""

    class CrashError(RuntimeError):
        pass

    def crash(x: Tensor, n: int) -> Tensor:
        if n == 1:
            raise CrashError("illegal memory access")
        raise BackendUnavailableError(
            "of an op called inside", op="other", backend="torch", reasons=("inner",)
        )

    toy.serve("torch", 1, kernel=crash)
    toy.serve("inductor", 2)
    for backend in (None, "torch"):
        with pytest.raises(CrashError, match="illegal memory access"):
            toy(backend)
        with pytest.raises(BackendUnavailableError, match="of an op called inside"):
            toy(backend, n=2)
    assert toy.calls == {"torch": 4}
    assert torch_ops.select_kernel("toy", platform=CPU).backend is Backend.TORCH


def test_get_kernel_returns_the_function_without_checks() -> None:
    kernel = torch_ops.get_kernel("silu_and_mul", "torch")
    assert kernel is ops.silu_and_mul.declaration.reference
    x = torch.randn(3, 8, requires_grad=True)
    assert kernel(x).requires_grad
    register("triton")
    assert torch_ops.get_kernel("loose") is math.sqrt


def test_get_kernel_goes_on_only_where_nobody_chose(toy: Toy) -> None:
    """The same at the first call as at later ones."""
    first = toy.serve("torch", 1)
    toy.serve("inductor", 2)
    sys.modules[first.module].__dict__.pop("toy")
    for _ in range(2):
        assert float(torch_ops.get_kernel("toy")(torch.ones(1))) == 2
        with pytest.raises(BackendUnavailableError, match="loading it failed: AttributeError"):
            torch_ops.get_kernel("toy", "torch")
        with torch_ops.use_backend("torch"), pytest.raises(BackendUnavailableError) as raised:
            torch_ops.get_kernel("toy")
        assert "chosen by scope" in str(raised.value)


def test_a_kernel_that_cannot_be_loaded_is_skipped_and_told(toy: Toy) -> None:
    first = toy.serve("torch", 1)
    toy.serve("inductor", 2)
    sys.modules[first.module].__dict__.pop("toy")
    for _ in range(2):
        with torch_ops.trace() as seen:
            assert toy() == 2
        ((record, skipped),) = [(r, r.skipped) for r in seen.records]
        assert record.backend is Backend.INDUCTOR
        ((name, reason),) = skipped
        assert name == "torch"
        assert reason.startswith("loading it failed: AttributeError: module")
        with pytest.raises(BackendUnavailableError, match="loading it failed: AttributeError"):
            toy("torch")


def test_states(toy: Toy) -> None:
    """Declared, found, imported, verified and failed are kept apart."""
    toy.serve("torch", 1)
    broken = toy.serve("triton", 3)
    sys.modules[broken.module].__dict__.pop("toy")
    torch_ops.register_kernel(KernelSpec("toy", "aiter", "no_such_package_anywhere:f"))

    def states() -> dict[str, str]:
        return {c.backend.value: c.state for c in torch_ops.explain("toy", platform=CPU).candidates}

    assert states() == {"torch": "found", "triton": "found", "aiter": "declared"}
    torch_ops.get_kernel("toy", "torch")
    with pytest.raises(BackendUnavailableError):
        torch_ops.get_kernel("toy", "triton")
    assert states() == {"torch": "imported", "triton": "failed", "aiter": "declared"}
    toy()
    assert states() == {"torch": "verified", "triton": "failed", "aiter": "declared"}
    torch_ops.refresh()
    assert states() == {"torch": "verified", "triton": "found", "aiter": "declared"}


def test_cpu_tensors_on_an_op_for_gpus(toy: Toy) -> None:
    """Our words, with op, device, and why each backend is out; not the dispatcher's."""
    toy.serve("flashinfer", 4, requires=[Requirement.cuda((8, 0))])
    toy.serve("aiter", 5, requires=[Requirement.rocm()])
    with pytest.raises(NoBackendError) as raised:
        toy()
    message = str(raised.value)
    assert "op 'toy' has no backend usable on device 'cpu'" in message
    assert "flashinfer  CUDA only (device is 'cpu')" in message
    assert "aiter  ROCm only (device is 'cpu')" in message
    assert not toy.calls


def test_other_devices_are_refused(toy: Toy) -> None:
    toy.serve("torch", 1)
    with pytest.raises(ValueError, match="device 'meta' is not supported"):
        torch_ops.select_kernel("toy", args=(torch.ones(2, device="meta"),))
    assert ops.toy(torch.ones(2, device="meta")).device.type == "meta"
    assert not toy.calls
