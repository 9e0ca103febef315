"""Which backend differentiates is chosen once for calls that are alike, and anew where it may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_ops
from torch_ops import Platform, ops, training, tuning

OP, CPU = "silu_and_mul", Platform.cpu()


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The choices that are made, in order."""
    made: list[str] = []
    choose = training.choose

    def noted(*args: Any) -> str:
        made.append(choose(*args))
        return made[-1]

    monkeypatch.setattr(training, "choose", noted)
    return made


def call(*shape: int) -> None:
    assert ops.silu_and_mul(torch.ones(*shape, requires_grad=True)).requires_grad


def test_a_choice_holds_until_the_policy_changes(chosen: list[str]) -> None:
    undo: Callable[[], None] = torch_ops.set_backend("torch")  # a change: nothing is known
    for shape in ((2, 4), (3, 8), (2, 4)):
        call(*shape)
    assert chosen == ["torch"]
    with torch_ops.use_backend("torch"):
        call(2, 4)
    assert len(chosen) == 2
    call(2, 4)
    assert len(chosen) == 2
    undo()
    call(2, 4)
    assert len(chosen) == 3
    spec = torch_ops.registry.find(f"{OP}_backward", "torch")
    torch_ops.registry.unregister(spec)
    try:
        assert training._remembered(OP, CPU, None, (torch.ones(2, 4),)) == "inductor"
    finally:
        torch_ops.registry.register(spec)


def test_a_predicate_is_asked_at_every_call(chosen: list[str]) -> None:
    x = torch.ones(2, 4)
    for _ in range(2):
        assert training._remembered(OP, CPU, "inductor", (x,)) == "inductor"
    assert chosen == ["inductor"] * 2


def test_looks_tell_calls_apart_where_a_table_decides(
    chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    undo = torch_ops.set_backend()
    monkeypatch.setattr(tuning, "decides", lambda op, platform: True)
    monkeypatch.setattr(training, "_LOOKS", 2)
    shapes = [(2, 4), (3, 4), (2, 4), (3, 4), (5, 4), (2, 4)]
    counts = []
    for shape in shapes:
        call(*shape)
        counts.append(len(chosen))
    assert counts == [1, 2, 2, 2, 3, 4]  # the third look starts anew
    undo()


def _disable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_OPS_DISABLE", "torch")
    torch_ops.refresh()


LATER: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "disabled": _disable,
    "required": lambda _: torch_ops.set_backend(batch_invariant=True),
    "chosen": lambda _: torch_ops.set_backend("inductor"),
}


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("later", LATER)
def test_a_backward_asks_no_policy(
    later: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is by then: all was asked before forward ran."""
    torch_ops.set_inline(False)
    x, y = torch.randn(3, 8, requires_grad=True), torch.randn(1, 4, 2, 8, requires_grad=True)

    def forward() -> torch.Tensor:
        result: torch.Tensor = ops.silu_and_mul(x).sum() + ops.attention(y, y, y).sum()
        return result

    call = torch.compile(forward, backend="aot_eager", fullgraph=True) if compiled else forward
    expected = torch.autograd.grad(call(), (x, y))
    loss = call()
    LATER[later](monkeypatch)
    with torch_ops.trace() as seen:
        found = torch.autograd.grad(loss, (x, y))
    assert all(map(torch.equal, found, expected))
    assert {(r.op, r.backend.value, r.source) for r in seen.records} == {
        (f"{op}_backward", "torch", "forward") for op in (OP, "attention")
    }


@pytest.mark.usefixtures("restored")
def test_a_second_derivative_asks_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 1, 8, requires_grad=True)
    out = ops.apply_rope(q, q.detach(), torch.ones(2, 8), torch.arange(2))[0].square().sum()
    _disable(monkeypatch)
    (first,) = torch.autograd.grad(out, q, create_graph=True)
    with torch_ops.trace() as seen:
        first.square().sum().backward()
    assert [(r.op, r.source, r.count) for r in seen.records] == [("apply_rope", "forward", 2)]


@pytest.mark.usefixtures("restored")
def test_a_backward_that_is_gone_says_so() -> None:
    loss = ops.silu_and_mul(torch.ones(2, 4, requires_grad=True)).sum()
    spec = torch_ops.registry.find(f"{OP}_backward", "torch")
    torch_ops.registry.unregister(spec)
    broken = torch_ops.KernelSpec(spec.op, spec.backend, "torch_ops.no_such_module:kernel")
    try:
        with pytest.raises(torch_ops.UnknownBackendError, match=f"for op '{OP}_backward'"):
            loss.backward(retain_graph=True)
        torch_ops.registry.register(broken)
        text = "'torch', chosen by forward, is not usable here.*loading it failed: Mod"
        with pytest.raises(torch_ops.BackendUnavailableError, match=f"(?s){text}"):
            loss.backward()
    finally:
        if broken in torch_ops.registry.get(spec.op):
            torch_ops.registry.unregister(broken)
        torch_ops.registry.register(spec)
