"""Memory beside a kernel's tensors is watched, and the device is asked whether it still serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_ops.declarations import catalogue
from torch_ops.testing import examine, proof_of
from torch_ops.testing.canaries import BYTE, GUARD, Guards, probe
from torch_ops.testing.compare import DeviceLostError, ViolationError
from torch_ops.testing.examine import Examiner, Tally
from torch_ops.testing.registered import registered
from torch_ops.testing.spec import Operand, Spec
from torch_ops.testing.subject import subject_of

OP = "silu_and_mul"
SPEC = Spec.of(OP, {"half": 3}, {"x": Operand("float32")})
reference: Callable[[Tensor], Tensor] = catalogue()[OP].reference


def _examine(kernel: Any) -> float | None:
    subject, contract = subject_of(kernel), catalogue()[OP].contract
    return Examiner(subject, proof_of(OP), contract)(SPEC, Tally())


def test_guards_lie_around_two_holes_of_each_size(device: torch.device) -> None:
    guards = Guards.place((100, 0), device)
    assert [block.numel() for block in guards.blocks] == 5 * [GUARD]
    guards.check()


@pytest.mark.parametrize("place", [0, GUARD - 1])
@pytest.mark.parametrize("block", [0, 2])
def test_a_changed_byte_of_a_guard_is_seen(place: int, block: int, device: torch.device) -> None:
    guards = Guards.place((4,), device)
    guards.blocks[block][place] = BYTE ^ 1
    with pytest.raises(ViolationError, match=r"memory beside the outputs changed \(1 bytes\)"):
        guards.check()


def test_an_example_checks_its_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[Guards] = []

    def place(sizes: Any, device: torch.device) -> Guards:
        assert sizes == [12]
        placed.append(Guards.place(sizes, device))
        return placed[-1]

    def kernel(x: Tensor) -> Tensor:
        placed[-1].blocks[1][7] = 0
        return reference(x)

    monkeypatch.setattr(examine, "Guards", type("Watched", (), {"place": staticmethod(place)}))
    with pytest.raises(ViolationError, match=r"\[contract\] memory beside the outputs changed"):
        _examine(kernel)


def test_a_write_past_a_contiguous_input_is_seen() -> None:
    def kernel(x: Tensor) -> Tensor:
        x.as_strided((1,), (1,), x.storage_offset() + x.numel()).zero_()
        return reference(x)

    with pytest.raises(
        ViolationError, match=r"x: an input changed .*\d of them outside its elements"
    ):
        _examine(kernel)


def test_a_device_that_serves(device: torch.device) -> None:
    probe(device)


def test_a_device_that_serves_no_more_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any, **options: Any) -> Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access\nmore")

    def kernel(x: Tensor) -> Tensor:
        monkeypatch.setattr(torch, "arange", lost)
        raise RuntimeError("launch failed")

    with pytest.raises(DeviceLostError) as seen:
        _examine(kernel)
    assert seen.value.spec == SPEC.to_json()
    assert seen.value.detail == (
        "supports() accepted the call, which raised RuntimeError: launch failed; "
        "then a probe raised AcceleratorError: CUDA error: an illegal memory access"
    )


def test_an_error_of_the_device_outside_of_calls_is_a_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(outputs: Any, expected: Any) -> float:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(examine, "check_outputs", check)
    with pytest.raises(DeviceLostError, match="AcceleratorError: CUDA error: unspecified") as seen:
        _examine(reference)
    assert seen.value.spec == SPEC.to_json()


def test_opcheck_is_followed_by_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device, before: str = "") -> None:
        raise DeviceLostError("no answer")

    monkeypatch.setattr(examine, "probe", lost)
    subject = registered(OP, "torch")
    with pytest.raises(DeviceLostError, match="no answer") as seen:
        Examiner(subject, proof_of(OP), catalogue()[OP].contract).operator(SPEC, "opcheck")
    assert seen.value.spec == SPEC.to_json()


def test_a_device_that_computes_wrongly_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "arange", lambda n, device: torch.ones(n, device=device))
    with pytest.raises(ViolationError, match="first; then a probe of the device: 64 is not 85344"):
        probe(torch.device("cpu"), "first")
