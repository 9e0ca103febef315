"""The private parts of Dynamo: where they are missing, and guards while threads change policies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_ops
from torch_ops import dynamo, policy


def normalize(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.torch_ops.rms_norm(x)
    return out


@pytest.fixture
def without_guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def missing(tracer: object, dependency: object) -> None:
        raise AttributeError("module 'torch._dynamo.source' has no attribute 'AttrSource'")

    monkeypatch.setattr(dynamo, "_install", missing)
    monkeypatch.setattr(policy, "_frozen", None)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("without_guards")
def test_a_change_is_refused_when_compiled_code_cannot_follow_it() -> None:
    x = torch.randn(3, 8)
    compiled = torch.compile(normalize, backend="aot_eager", fullgraph=True)
    compiled(x)
    with pytest.raises(torch_ops.TorchOpsError, match=r"can't be guarded .*AttrSource.*backend="):
        torch_ops.set_backend("inductor")
    with (
        pytest.raises(torch_ops.TorchOpsError, match="can't be guarded"),
        torch_ops.use_backend("inductor"),
    ):
        pass
    with torch_ops.debug():  # changes no choice
        compiled(x)


def test_guards_are_there_on_this_torch() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(normalize, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(3, 8))
    assert policy._frozen is None


def test_a_verdict_is_not_kept_from_before_a_change() -> None:
    """A change while snapshots are compared: what they gave before it is worth nothing."""
    state: dict[str, Any] = {"generation": 0, "backend": "torch"}
    verdicts = dynamo._Verdicts(lambda: state["generation"])
    verdicts.add("norm", lambda: state["backend"])

    def changed() -> str:
        seen = state["backend"]
        if state["generation"] == 0:
            state.update(generation=1, backend="triton")
            dynamo.forget()
        return str(seen)

    verdicts._wanted["norm"] = (changed, "torch")
    assert verdicts[None] is False
    assert dict(verdicts) == {None: False}
    state["backend"] = "torch"
    assert verdicts[None] is False  # until it is told
    dynamo.forget()
    assert verdicts[None] is True


def test_verdicts_of_many_scopes_are_not_kept_for_good_nor_those_of_dead_frames() -> None:
    verdicts = dynamo._Verdicts(lambda: 0)
    for scope in range(3 * dynamo._SCOPES):
        assert verdicts[scope] is True
    assert len(verdicts) <= dynamo._SCOPES + 1
    key = id(verdicts)
    assert key in dynamo._verdicts
    del verdicts
    assert key not in dynamo._verdicts


@pytest.mark.usefixtures("fresh_dynamo", "opaque")
def test_a_choice_that_another_thread_changes_meanwhile() -> None:
    """The call that compiles runs what it made; later ones don't, not on the way back either."""
    undos: list[Callable[[], None]] = []
    changes = [lambda: undos.append(torch_ops.set_backend(rms_norm="inductor"))]
    graphs = 0

    def compiler(module: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        if changes:
            thread = threading.Thread(target=changes.pop())
            thread.start()
            thread.join()
        return module.forward

    call: Any = torch.compile(normalize, backend=compiler, fullgraph=True)
    made = []
    x = torch.randn(3, 8)
    for _ in range(3):
        torch.testing.assert_close(call(x), torch.nn.functional.rms_norm(x, (8,), eps=1e-6))
        made.append(graphs)
    undos.pop()()
    call(x)
    assert [*made, graphs] == [1, 2, 2, 3]
