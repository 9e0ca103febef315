"""Derivatives and other transforms of PyTorch: refused with words or right, never zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, grad, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from torch_ops import NoBackwardError, ops
from torch_ops.declarations import catalogue

from . import samples
from .samples import BACKENDS, CELLS, FLOATING

# PyTorch's own forward mode scripts its decompositions when it is used first.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
FUNCTIONAL = [op for op in FLOATING if not catalogue()[op].mutates]


def of_first(op: str, backend: str | None = None) -> tuple[Callable[[Tensor], Any], Tensor]:
    """The op as a function of its first tensor that can have a derivative, and that tensor."""
    args = samples.arguments(op)
    name = samples.differentiable(op)[0]

    def function(x: Tensor) -> Any:
        made = samples.lay_out(args, "contiguous") | {name: x}
        return samples.outputs(op, made, getattr(ops, op)(**made, backend=backend))[0]

    return function, args[name]


ASKS: dict[str, Callable[[Callable[[Tensor], Any], Tensor], Any]] = {
    "grad": lambda f, x: grad(lambda a: f(a).sum())(x),
    "grad of what follows": lambda f, x: grad(lambda a: f(a * 2).sum())(x),
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),)),
    "vjp": lambda f, x: vjp(f, x)[1](f(x)),
    "jacrev": lambda f, x: jacrev(f)(x),
    "grad in vmap": lambda f, x: vmap(grad(lambda a: f(a).sum()))(x.unsqueeze(0)),
    "vmap in jvp": lambda f, x: jvp(vmap(f), (x.unsqueeze(0),), (torch.ones_like(x)[None],)),
}


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_derivatives_are_refused(ask: str, backend: str | None) -> None:
    function, x = of_first("silu_and_mul", backend)
    with pytest.raises(NoBackwardError, match="op 'silu_and_mul': an input requires grad and no"):
        ASKS[ask](function, x)


@pytest.mark.parametrize("op", FLOATING)
def test_every_op_refuses(op: str) -> None:
    function, x = of_first(op)
    with pytest.raises(NoBackwardError, match=f"op '{op}': an input requires grad"):
        grad(lambda a: function(a).sum())(x)
    with pytest.raises(NoBackwardError, match=f"op '{op}': an input requires grad"):
        jvp(function, (x,), (torch.ones_like(x),))


@pytest.mark.parametrize(
    ("op", "backend"), [*((op, None) for op in FLOATING), *(c for c in CELLS if c[0] in FLOATING)]
)
def test_dual_tensors_are_refused(op: str, backend: str | None) -> None:
    """A kernel that isn't made of ATen calls would drop the tangent."""
    function, x = of_first(op, backend)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NoBackwardError, match=f"op '{op}': an input requires grad"):
            function(dual)
        plain, _ = of_first(op)
        plain(x.clone())
        plain(forward_ad.unpack_dual(dual).primal.clone())


@pytest.mark.parametrize("ask", ["grad", "jvp"])
def test_compiled_code_refuses_too(ask: str) -> None:
    function, x = of_first("silu_and_mul")
    torch._dynamo.reset()
    compiled = torch.compile(lambda a: ASKS[ask](function, a), backend="eager")
    with pytest.raises(Exception, match="op 'silu_and_mul': an input requires grad and no"):
        compiled(x)


def test_what_needs_no_derivative_passes() -> None:
    function, x = of_first("silu_and_mul")
    kept = function(x)
    found = grad(lambda a: (function(a.detach()) * a[..., :8]).sum())(x)
    assert torch.equal(found[..., :8], kept)
    found = grad(lambda a: (function(x) * a).sum())(torch.tensor(2.0))
    torch.testing.assert_close(found, kept.sum())
    primal, tangent, *_ = jvp(lambda a: function(x) * a, (torch.tensor(1.0),), (torch.tensor(1.0),))
    assert torch.equal(primal, kept)
    assert torch.equal(tangent, kept)

    def quiet(a: Tensor) -> Any:
        with torch.no_grad():
            inner = function(a)
        return (inner * a[..., :8]).sum()

    assert torch.equal(grad(quiet)(x)[..., :8], kept)


@pytest.mark.parametrize("op", FUNCTIONAL)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_right(op: str) -> None:
    function, x = of_first(op)
    stacked = torch.stack([x, x + 1])
    expected = torch.stack([function(x), function(x + 1)])
    assert torch.equal(vmap(function)(stacked), expected)


def test_vmap_of_a_mutating_op_is_refused_by_pytorch() -> None:
    weight = torch.ones(8)
    with pytest.raises(RuntimeError, match="Batching rule not implemented for torch_ops::fused"):
        vmap(lambda x, r: ops.fused_add_rms_norm_(x, r, weight))(torch.ones(2, 8), torch.ones(2, 8))


@pytest.mark.parametrize("op", FLOATING)
def test_make_fx_records_the_operator(op: str) -> None:
    """One node, not what is inside of it; what it writes is written."""
    packet: Any = getattr(torch.ops.torch_ops, op)
    args = samples.arguments(op)
    for mode in ("real", "fake"):
        made = samples.lay_out(args, "contiguous")
        traced = make_fx(packet, tracing_mode=mode)(*made.values())
        calls = [node.target for node in traced.graph.nodes if node.op == "call_function"]
        assert calls[0] is packet.default
        assert all("getitem" in str(call) for call in calls[1:])


@pytest.mark.parametrize("op", FUNCTIONAL)
def test_functionalize_keeps_functional_operators(op: str) -> None:
    function, x = of_first(op)
    assert torch.equal(functionalize(function)(x), function(x))


def test_symbolic_trace_records_the_operator() -> None:
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(_Norm()))
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.torch_ops.rms_norm]
    x = torch.randn(2, 8)
    assert torch.equal(traced(x), _Norm()(x))


class _Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return torch.ops.torch_ops.rms_norm(x, self.weight)


def test_modules_that_call_ops_work_with_functional_call() -> None:
    x = torch.randn(2, 8)
    found = functional_call(_Norm(), {"weight": torch.full((8,), 2.0)}, (x,))
    assert torch.equal(found, ops.rms_norm(x, torch.full((8,), 2.0)))
