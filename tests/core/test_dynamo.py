"""The private parts of Dynamo: what happens where they are missing."""

from __future__ import annotations

from collections.abc import Iterator

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
