"""Calls of ``torch_ops.ops`` that go past the dispatcher, and who has to see the operator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ops import NoBackwardError, TorchOpsError, ops

from .looks import RMS, WEIGHT, X, known

pytestmark = [
    pytest.mark.usefixtures("strangers"),
    # PyTorch's own forward mode scripts its decompositions when it is used first.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]


class SeesOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [SeesOperators, SeesFunctions])
def test_modes_see_the_operator(mode: type[Any]) -> None:
    shortcuts = known()
    with mode() as active:
        found = ops.rms_norm(X, WEIGHT)
    assert RMS.default in active.seen
    assert shortcuts.count == 0
    assert torch.equal(found, ops.rms_norm(X, WEIGHT))
    assert shortcuts.count == 1


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device("cpu"),
    "another grad mode": torch.inference_mode,
    "profiler": lambda: profile(activities=[ProfilerActivity.CPU]),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_go_through_the_dispatcher(name: str) -> None:
    shortcuts = known()
    with CONTEXTS[name]():
        found = ops.rms_norm(X, WEIGHT)
    assert shortcuts.count == 0
    assert torch.equal(found, RMS(X, WEIGHT))


def test_the_profiler_sees_the_operator() -> None:
    known()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        ops.rms_norm(X, WEIGHT)
    assert "torch_ops::rms_norm" in {event.key for event in seen.key_averages()}


class Named(Tensor):
    """A subclass with the ``__torch_function__`` that all of them have."""


def test_subclasses_keep_their_type() -> None:
    shortcuts = known()
    assert type(ops.rms_norm(X.as_subclass(Named), WEIGHT)) is Named
    assert type(ops.rms_norm(TwoTensor(X, X), TwoTensor(WEIGHT, WEIGHT))) is TwoTensor
    assert shortcuts.count == 0


def test_negated_views_are_seen_as_their_values() -> None:
    shortcuts = known()
    negated = torch._neg_view(X)
    assert torch.equal(ops.rms_norm(negated, WEIGHT), ops.rms_norm((-X).clone(), WEIGHT))
    assert shortcuts.count == 1, "the copy alone"


def test_numbers_are_converted_by_the_dispatcher() -> None:
    """An int where the schema says float arrives as a float in every kernel."""
    shortcuts = known("rms_norm", X, WEIGHT, 1.0)
    assert torch.equal(ops.rms_norm(X, WEIGHT, 1), ops.rms_norm(X, WEIGHT, True))
    assert torch.equal(ops.rms_norm(X, WEIGHT, torch.tensor(1.0)), ops.rms_norm(X, WEIGHT, 1))
    texts = []
    for call in (ops.rms_norm, RMS.default):
        with pytest.raises(RuntimeError, match="argument 'eps'") as raised:
            call(X, WEIGHT, torch.ones(2))
        texts.append(str(raised.value))
    assert texts[0] == texts[1]
    assert shortcuts.count == 0
    ops.rms_norm(X, WEIGHT, 1.0)
    assert shortcuts.count == 1


def test_other_devices_and_layouts_are_refused_as_ever() -> None:
    shortcuts = known()
    assert ops.rms_norm(X.to("meta"), WEIGHT.to("meta")).is_meta
    for call in (ops.rms_norm, RMS):
        with pytest.raises(TorchOpsError, match=r"argument 'x' is of layout torch\.sparse_coo"):
            call(X.to_sparse(), WEIGHT)
        with pytest.raises(ValueError, match="argument 'weight' is on device meta"):
            call(X, WEIGHT.to("meta"))
    with pytest.raises(TypeError, match="argument 'x' must be a Tensor, received list"):
        ops.rms_norm([1.0], WEIGHT)
    assert shortcuts.count == 0


def test_fake_tensors_stay_fake() -> None:
    shortcuts = known()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(ops.rms_norm(X, WEIGHT), FakeTensor)
    assert shortcuts.count == 0


TRANSFORMS: dict[str, Callable[[], Any]] = {
    "vmap": lambda: torch.func.vmap(lambda x: ops.rms_norm(x, WEIGHT))(X.expand(2, 3, 8)),
    "functionalize": lambda: torch.func.functionalize(lambda x: ops.rms_norm(x, WEIGHT))(X),
    "make_fx": lambda: make_fx(lambda x: ops.rms_norm(x, WEIGHT))(X)(X),
    "make_fx pre-dispatch": lambda: make_fx(
        lambda x: ops.rms_norm(x, WEIGHT), pre_dispatch=True
    )(X)(X),
    "jit.trace": lambda: torch.jit.trace(
        lambda x: ops.rms_norm(x, WEIGHT), (X,), check_trace=False
    )(X),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_see_the_operator(name: str) -> None:
    shortcuts = known()
    found = TRANSFORMS[name]()
    assert shortcuts.count == 0
    torch.testing.assert_close(found, RMS(X, WEIGHT).expand(found.shape), rtol=0, atol=0)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd])
def test_derivatives_are_refused(transform: Callable[..., Any]) -> None:
    known()
    with pytest.raises(NoBackwardError):
        transform(lambda x: ops.rms_norm(x, WEIGHT).sum())(X)


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return ops.rms_norm(x, WEIGHT)


@pytest.mark.parametrize("strict", [False, True])
def test_export_records_the_operator(strict: bool) -> None:
    shortcuts = known()
    exported = torch.export.export(Norm(), (X,), strict=strict)
    assert RMS.default in {node.target for node in exported.graph.nodes}
    assert shortcuts.count == 0


@pytest.mark.usefixtures("fresh_dynamo", "opaque")
def test_dynamo_makes_one_node_of_it() -> None:
    shortcuts = known()
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: ops.rms_norm(x, WEIGHT), backend=keep, fullgraph=True)
    compiled(X)
    (graph,) = graphs
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == [RMS.default]
    assert shortcuts.count == 0
