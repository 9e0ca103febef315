"""Gradients: right, on the backend that ran forward, in eager and compiled code, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import torch_ops
from tests.kept import kept
from torch_ops import DeclarationError, NoBackwardError, ops
from torch_ops.declarations import catalogue

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_and_mul": functional.silu,
    "gelu_and_mul": functional.gelu,
    "gelu_tanh_and_mul": lambda g: functional.gelu(g, approximate="tanh"),
}
OPS = sorted(PLAIN)
# Their tests are in files of their own.
OTHERS = (
    "apply_rope", "attention", "attention_with_lse", "fused_add_rms_norm",
    "gemma_fused_add_rms_norm", "gemma_rms_norm", "layer_norm", "rms_norm",
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def plain(op: str, x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return PLAIN[op](gate) * value


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    (function(leaf) * torch.linspace(-1, 2, x.shape[-1] // 2)).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def ran(loss: Tensor) -> list[tuple[str, str]]:
    """Name the kernels of a backward."""
    with torch_ops.trace() as seen:
        torch.autograd.backward([loss])
    return [(record.op, record.backend.value) for record in seen.records]


def test_these_are_differentiable() -> None:
    found = [op for op, declaration in catalogue().items() if declaration.gradient is not None]
    assert sorted(found) == sorted([*OPS, *OTHERS])


@pytest.mark.parametrize("way", ["callable", "operator", "overload"])
@pytest.mark.parametrize("op", OPS)
def test_gradcheck(op: str, way: str) -> None:
    packet = getattr(torch.ops.torch_ops, op)
    call = {
        "callable": getattr(ops, op),
        "operator": packet,
        "overload": lambda x: packet.backend(x, "torch"),
    }[way]
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, (x,))
    assert torch.autograd.gradcheck(call, (x[..., ::2],))


@pytest.mark.parametrize(
    ("op", "backend"), [*((op, "torch") for op in OPS), ("silu_and_mul", "inductor")]
)
def test_backward_runs_on_the_backend_that_ran_forward(op: str, backend: str) -> None:
    """Whoever chose it, and outside of its scope."""
    x = torch.randn(3, 8)
    expected = gradient(lambda x: plain(op, x), x)
    leaf = x.clone().requires_grad_()
    ways: list[Callable[[], Any]] = [
        lambda: getattr(ops, op)(leaf, backend=backend),
        lambda: getattr(ops, op)(leaf),
    ]
    for choose in ways:
        leaf.grad = None
        with torch_ops.use_backend(backend):
            out = (choose() * torch.linspace(-1, 2, 4)).sum()
        assert ran(out) == [(f"{op}_backward", backend)]
        torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.parametrize("inline", ["auto", False])
def test_compiled_gradients_follow_the_policy(inline: Any) -> None:
    """One graph for each choice; backward by the backend of forward, also where it dissolves."""
    x = torch.randn(3, 8)
    expected = gradient(lambda x: plain("silu_and_mul", x), x)
    undo = torch_ops.set_inline(inline)
    compiled: Callable[..., Any] = torch.compile(ops.silu_and_mul, fullgraph=True)
    kernels = []
    for backend in ("inductor", "torch", "inductor"):
        with torch_ops.use_backend(backend):
            torch.testing.assert_close(gradient(compiled, x), expected)
            leaf = x.clone().requires_grad_()
            out = compiled(leaf).sum()
        kernels.append(ran(out))
    undo()
    by = [("silu_and_mul_backward", "inductor")]
    own = [] if inline == "auto" else [("silu_and_mul_backward", "torch")]
    assert kernels == [by, own, by]


def test_backends_without_a_backward_refuse_at_the_call() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    spec = torch_ops.registry.find("silu_and_mul_backward", "inductor")
    torch_ops.registry.unregister(spec)
    try:
        text = "backend 'inductor' doesn't have a backward .*backends with one: "
        with pytest.raises(NoBackwardError, match=text):
            ops.silu_and_mul(x, backend="inductor")
        assert ops.silu_and_mul(x).requires_grad
    finally:
        torch_ops.registry.register(spec)


def test_calls_without_gradients_reach_the_kernel_itself() -> None:
    """No node, no second dispatch; the profiler sees one operator."""
    x = torch.randn(3, 8)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert ops.silu_and_mul(x).grad_fn is None
    leaf = x.clone().requires_grad_()
    with torch.no_grad():
        assert not torch.ops.torch_ops.silu_and_mul(leaf).requires_grad
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        torch.ops.torch_ops.silu_and_mul(x)
    names = [event.name for event in seen.events() if event.name.startswith("torch_ops::")]
    assert names == ["torch_ops::silu_and_mul"]


def test_what_is_kept_is_the_input_alone() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    assert [tensor.data_ptr() for tensor in kept(ops.silu_and_mul, x)] == [x.data_ptr()]


@pytest.mark.parametrize("op", ["silu_and_mul", "rms_norm"])
def test_second_derivatives_are_refused(op: str) -> None:
    """By the name of the op that was called."""
    x = torch.randn(3, 8, requires_grad=True)
    text = rf"op '{op}' has first derivatives only, .*\(accepted: create_graph=False\)"
    with pytest.raises(NoBackwardError, match=text):
        torch.autograd.grad(getattr(ops, op)(x).sum(), x, create_graph=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's own
def test_forward_mode_is_refused_where_a_gradient_is_wanted_too() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    text = "'rms_norm': .* no backend of the op has derivatives of torch.func or forward mode"
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, torch.ones_like(t)) for t in (x, weight)]
        for args in ((duals[0], weight), (x, duals[1])):
            for call in (ops.rms_norm, torch.ops.torch_ops.rms_norm):
                with pytest.raises(NoBackwardError, match=text):
                    call(*args)
        assert ops.rms_norm(x, weight).requires_grad


def test_tensors_without_data_have_gradients() -> None:
    """On whatever backend has a backward: none runs."""
    x, weight = (torch.randn(n, 8, device="meta", requires_grad=True)[0] for n in (1, 3))
    scopes: list[dict[str, Any]] = [{}, {"rms_norm": "triton", "batch_invariant": True}]
    for scope in scopes:
        with torch_ops.use_backend(**scope), torch_ops.trace() as seen:
            out = torch.ops.torch_ops.rms_norm.default(x, weight)
            found = torch.autograd.grad(out.sum(), (x, weight))
        assert [(t.device.type, t.shape) for t in found] == [("meta", (8,))] * 2
        assert not seen.records
    with pytest.raises(NoBackwardError, match="backend 'flashinfer' doesn't have a backward"):
        ops.rms_norm(x, weight, backend="flashinfer")
    assert not ops.rms_norm(x.detach()).requires_grad


def test_a_written_input_is_noticed() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    y = x * 1
    out = ops.silu_and_mul(y)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_odd_views_go_through_pytorch() -> None:
    """A conjugate's imaginary part is a view whose sign PyTorch has yet to change."""
    z = torch.randn(3, 8, dtype=torch.complex64)
    negated = z.conj().imag
    assert negated.is_neg()
    found = torch.ops.torch_ops.silu_and_mul(negated)
    torch.testing.assert_close(found, plain("silu_and_mul", -z.imag))


def test_a_declaration_refuses_what_it_cannot_keep() -> None:
    with pytest.raises(DeclarationError, match=r"accepted: .*tensors among"):
        catalogue()["silu_and_mul"].backward("silu_and_mul_backward", saves=("weight",))
