"""Kernels that are right are timed on the same arguments; the others are left out with reasons."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops
from torch_ops import KernelSpec, ops
from torch_ops.testing.proof import proof_of
from torch_ops.testing.spec import Spec
from torch_ops.tuner import measure, shapes, timing

CPU = torch.device("cpu")
MODULE = "tuner_test_kernels"
Replace = Callable[[Callable[..., Any]], None]


@pytest.fixture
def replace() -> Iterator[Replace]:
    """Make a function the kernel of rms_norm on Inductor, which would take seconds to compile."""

    def replaced(function: Callable[..., Any]) -> None:
        module = ModuleType(MODULE)

        def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
            result: Tensor = function(x, weight, eps)
            return result

        module.__dict__["rms_norm"] = rms_norm
        sys.modules[MODULE] = module
        torch_ops.registry.unregister(torch_ops.registry.find("rms_norm", "inductor"))
        torch_ops.register_kernel(KernelSpec("rms_norm", "inductor", f"{MODULE}:rms_norm"))

    yield replaced
    sys.modules.pop(MODULE, None)


def example(op: str = "rms_norm", **sizes: int) -> Spec:
    base = shapes.example(op, "float32")
    assert base is not None
    return shapes.altered(base, {"tokens": 5, "hidden": 32, **sizes}, {})


class FakeTimer:
    """Gives a time by backend and counts how often each was asked for."""

    def __init__(self, **us: float) -> None:
        self.us, self.asked = us, list[str]()

    def __call__(self, call: Callable[[], Any], device: torch.device) -> float:
        assert isinstance(call, functools.partial)
        name = call.keywords["backend"]
        self.asked.append(name)
        return self.us[name] + len(self.asked) / 100


def right(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    result: Tensor = ops.rms_norm(x, weight, eps, backend="torch")
    return result


def broken(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    raise RuntimeError("no such\n  instruction")


def test_right_kernels_are_ranked_by_the_better_of_two_turns(replace: Replace) -> None:
    replace(right)
    timer = FakeTimer(torch=9.0, inductor=4.0)
    row = measure.measure(example(), "b", CPU, timer)
    assert timer.asked == ["torch", "inductor", "inductor", "torch"]
    assert row.us == {"inductor": 4.02, "torch": 9.01}
    assert (row.order, row.bucket, row.rejected) == (("inductor", "torch"), "b", {})


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (lambda *args: right(*args) * 1.01, "out: error is "),
        (lambda *args: right(*args)[:1], "received [([1, 32], torch.float32)], accepted "),
        (broken, "which raised RuntimeError: no such instruction"),
    ],
)
def test_a_wrong_kernel_gets_no_time(
    kernel: Callable[..., Any], reason: str, replace: Replace
) -> None:
    replace(kernel)
    row = measure.measure(example(), "b", CPU, timer := FakeTimer(torch=9.0, inductor=4.0))
    assert row.order == ("torch",)
    assert reason in row.rejected["inductor"]
    assert set(timer.asked) == {"torch"}


def test_one_that_fails_while_it_is_timed_is_dropped(replace: Replace) -> None:
    replace(right)
    timer = FakeTimer(torch=9.0)
    row = measure.measure(example(), "b", CPU, timer)
    assert row.order == ("torch",)
    assert row.rejected == {"inductor": "while timing: KeyError: 'inductor'"}


def test_those_that_cannot_run_are_no_candidates(
    replace: Replace, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(right)
    monkeypatch.setenv("TORCH_OPS_DISABLE", "rms_norm:inductor")
    torch_ops.refresh()
    row = measure.measure(example(), "b", CPU, FakeTimer(torch=9.0))
    assert (row.order, row.rejected) == (("torch",), {})


def test_what_an_op_writes_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidates of a mutating op start from equal arguments."""
    monkeypatch.setenv("TORCH_OPS_DISABLE", "inductor")
    torch_ops.refresh()
    assert proof_of("fused_add_rms_norm_").mutates
    row = measure.measure(example("fused_add_rms_norm_"), "b", CPU, timer := FakeTimer(torch=1.0))
    assert (row.order, timer.asked) == (("torch",), ["torch", "torch"])


def test_a_median_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a clock that a call moves on: once by much, else by 3 us."""
    now, count = [0.0], [0]

    def call() -> None:
        count[0] += 1
        now[0] += 1.0 if count[0] == 2 else 3e-6

    monkeypatch.setattr("torch_ops.tuner.timing.time.perf_counter", lambda: now[0])
    assert timing.median_us(call, CPU, 50.0) == pytest.approx(3.0)
    assert count[0] == timing.LEAST + 1  # the long one took all the time there was


@pytest.mark.gpu
def test_a_median_on_a_gpu(device: torch.device) -> None:
    """A copy of 64 MB takes as long as its bytes do, with nothing of the host in it."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    small, large = (torch.empty(n, device=device) for n in (1 << 10, 1 << 24))
    short, long = (timing.median_us(functools.partial(x.add_, 1.0), device) for x in (small, large))
    assert 0.5 < short < long
    assert 128 / long < 10  # MB / us: TB/s
