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
