"""Gradients of norms: those of the formula in plain PyTorch, of whatever is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import torch_ops
from tests.kept import bytes_kept
from torch_ops import NoBackwardError, ops

HIDDEN = 8
Made = list[Any]


def _rms(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def _fused(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms(total, weight, eps), total


PLAIN: dict[str, Callable[..., Any]] = {
    "rms_norm": _rms,
    "gemma_rms_norm": lambda x, weight, eps=1e-6: _rms(x, 1 + weight, eps),
    "layer_norm": lambda x, weight, bias, eps=1e-5: functional.layer_norm(
        x, x.shape[-1:], weight, bias, eps
    ),
    "fused_add_rms_norm": _fused,
    "gemma_fused_add_rms_norm": lambda x, r, weight, eps=1e-6: _fused(x, r, 1 + weight, eps),
}
OPS = sorted(PLAIN)


@pytest.fixture(autouse=True)
def own_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(
    op: str, shape: Sequence[int] = (2, 3, HIDDEN), dtype: torch.dtype = torch.float32
) -> Made:
    """Leaves in the order of the signature."""
    made: Made = [torch.randn(*shape, dtype=dtype)]
    if "add" in op:
        made.append(torch.randn(*shape, dtype=dtype))
    vectors = 2 if op == "layer_norm" else 1
    made += [torch.randn(shape[-1], dtype=dtype) for _ in range(vectors)]
    return [each.requires_grad_() for each in made]


def outputs(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def gradients(function: Callable[..., Any], made: Made, how: str = "dense") -> tuple[Any, ...]:
    """Differentiate by every leaf, from gradients of a kind: of `sum`, strided, or plain ones."""
    found = [each for each in outputs(function(*made)) if each.requires_grad]
    if how == "expanded":
        grads = [each.new_full((), 0.5 + i).expand(each.shape) for i, each in enumerate(found)]
    else:
        grads = [torch.linspace(-1, 2 + i, 2 * o.numel()) for i, o in enumerate(found)]
        grads = [g.view(*o.shape, 2)[..., 0] for g, o in zip(grads, found, strict=True)]
        if how == "dense":
            grads = [grad.contiguous() for grad in grads]
    leaves = [leaf for leaf in made if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.autograd.grad(found, leaves, grads)


def agree(op: str, made: Made, how: str = "dense", backend: str = "torch") -> None:
    call = getattr(ops, op)
    found = gradients(lambda *args: call(*args, backend=backend), made, how)
    wanted = gradients(PLAIN[op], made, how)
    for grad, want in zip(found, wanted, strict=True):
        assert grad.dtype == want.dtype
        torch.testing.assert_close(grad, want)


@pytest.mark.parametrize("way", ["callable", "overload"])
@pytest.mark.parametrize("op", OPS)
def test_gradcheck(op: str, way: str) -> None:
    packet, eps = getattr(torch.ops.torch_ops, op), 1e-3
    callable_, made = getattr(ops, op), inputs(op, (2, 3, 4), torch.float64)
    call: Callable[..., Any] = {
        "callable": lambda *args: callable_(*args, eps=eps),
        "overload": lambda *args: packet.backend(*args, eps, "torch"),
    }[way]
    assert torch.autograd.gradcheck(call, made)
    wide = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *rest: call(x[..., ::2], *rest), [wide, *made[1:]])


@pytest.mark.parametrize("how", ["dense", "strided", "expanded"])
@pytest.mark.parametrize("op", OPS)
def test_gradients_of_any_shape_and_strides(op: str, how: str) -> None:
    for shape in ((HIDDEN,), (5, HIDDEN), (2, 3, 4, HIDDEN), (0, HIDDEN), (2, 0, 3), (3, 0)):
        if shape[-1]:
            agree(op, inputs(op, shape), how)
        else:  # a mean of nothing is NaN, which no element shows
            found = gradients(getattr(ops, op), inputs(op, shape), how)
            assert [each.shape for each in found] == [each.shape for each in inputs(op, shape)]


@pytest.mark.parametrize(
    ("op", "absent"),
    [("rms_norm", [1]), ("layer_norm", [1]), ("layer_norm", [2]), ("layer_norm", [1, 2])],
)
def test_vectors_that_are_absent(op: str, absent: list[int]) -> None:
    made = [None if i in absent else each for i, each in enumerate(inputs(op))]
    agree(op, made)


@pytest.mark.parametrize("op", OPS)
def test_whatever_of_the_inputs_needs_one(op: str) -> None:
    """Of a frozen norm, or of a frozen model with norms that learn; of one output of two."""
    for index in range(len(inputs(op))):
        made = [leaf.requires_grad_(i == index) for i, leaf in enumerate(inputs(op))]
        first = [lambda *args, f=f: outputs(f(*args))[0] for f in (getattr(ops, op), PLAIN[op])]
        torch.testing.assert_close(*(gradients(function, made) for function in first))
    for index in range(2 if "add" in op else 0):
        made = inputs(op)
        found, wanted = (
            torch.autograd.grad(function(*made)[index].sin().sum(), made, allow_unused=True)
            for function in (getattr(ops, op), PLAIN[op])
        )
        wanted = tuple(torch.zeros_like(made[i]) if g is None else g for i, g in enumerate(wanted))
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("op", OPS)
def test_each_gradient_has_the_dtype_of_its_input(op: str) -> None:
    rows = [each.detach().bfloat16().requires_grad_() for each in inputs(op) if each.dim() > 1]
    vectors = [each for each in inputs(op) if each.dim() == 1]
    made = [*rows, *vectors]
    grads = gradients(lambda *args: [o.float() for o in outputs(getattr(ops, op)(*args))], made)
    wide = [each.detach().float().requires_grad_() for each in made]
    wanted = gradients(getattr(ops, op), wide)
    assert [grad.dtype for grad in grads] == [each.dtype for each in made]
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.float(), want, rtol=2**-6, atol=2**-5)


@pytest.mark.parametrize(
    ("op", "backend"), [*((op, "torch") for op in OPS), ("fused_add_rms_norm", "inductor")]
)
def test_backward_runs_on_the_backend_that_ran_forward(op: str, backend: str) -> None:
    by = "layer_norm_backward" if op == "layer_norm" else "rms_norm_backward"
    made = inputs(op)
    with torch_ops.use_backend(backend):
        loss = torch.stack([each.sin().sum() for each in outputs(getattr(ops, op)(*made))]).sum()
    with torch_ops.trace() as seen:
        loss.backward()
    assert [(record.op, record.backend.value) for record in seen.records] == [(by, backend)]
    agree(op, made, backend=backend)


def _block(call: dict[str, Callable[..., Any]]) -> Callable[..., Tensor]:
    """One of each, in a chain."""

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = call["rms_norm"](x, weight)
        y, total = call["fused_add_rms_norm"](y, x, weight)
        y, total = call["gemma_fused_add_rms_norm"](y, total, bias)
        y = call["layer_norm"](call["gemma_rms_norm"](y, weight), weight, bias)
        result: Tensor = y * total.sin()
        return result

    return run


@pytest.mark.parametrize("inline", ["auto", False])
def test_compiled_gradients(inline: Any) -> None:
    """Where calls dissolve, and where they are calls of the backend that was chosen."""
    made = inputs("layer_norm")
    wanted = gradients(_block(PLAIN), made)
    undo = torch_ops.set_inline(inline)
    try:
        block = _block({op: getattr(ops, op) for op in OPS})
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        with torch_ops.trace() as seen:
            found = gradients(compiled, made)
    finally:
        undo()
    torch.testing.assert_close(found, wanted)
    backwards = sum(r.count for r in seen.records if r.op.endswith("_backward"))
    assert backwards == (0 if inline == "auto" else len(OPS))


def saved(function: Callable[..., Any], made: Made) -> int:
    """Count the bytes that are kept for backward, each storage once."""

    def call() -> None:
        assert outputs(function(*made))[0].requires_grad

    return sum(bytes_kept(call).values())


@pytest.mark.parametrize("op", OPS)
def test_no_more_is_kept_than_by_plain_pytorch(op: str) -> None:
    """PyTorch's own norms keep statistics beside the rows, or what lies between their steps."""
    made = inputs(op, (64, 32))
    rows, vectors = 64 * 32 * 4, sum(32 * 4 for each in made if each.dim() == 1)
    assert saved(getattr(ops, op), made) == rows + vectors
    assert saved(getattr(ops, op), made) <= saved(PLAIN[op], made)


@pytest.mark.parametrize("op", OPS)
def test_second_derivatives_are_refused(op: str) -> None:
    made = inputs(op)
    with pytest.raises(NoBackwardError, match=f"'{op}' has first derivatives only"):
        torch.autograd.grad(outputs(getattr(ops, op)(*made))[0].sum(), made, create_graph=True)


def test_a_written_sum_is_noticed() -> None:
    out, total = ops.fused_add_rms_norm(*inputs("fused_add_rms_norm"))
    with torch.no_grad():
        total.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("op", OPS)
def test_calls_without_gradients_reach_the_kernel_itself(op: str) -> None:
    plain = [each.detach() for each in inputs(op)]
    packet = getattr(torch.ops.torch_ops, op)
    packet(*plain)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        found = packet(*plain)
    names = [event.name for event in seen.events() if event.name.startswith("torch_ops::")]
    assert names == [f"torch_ops::{op}"]
    assert not any(each.requires_grad for each in outputs(found))
    with torch.no_grad():
        assert outputs(packet(*inputs(op)))[0].grad_fn is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("op", OPS)
def test_triton_gives_gradients_on_a_gpu(op: str, device: torch.device) -> None:
    """Of both overloads, eager and compiled; the first of the declared order that has them."""
    made = [each.detach().to(device).requires_grad_() for each in inputs(op, (5, 7, 96))]
    wanted = gradients(PLAIN[op], made, "expanded")
    call = getattr(ops, op)
    with torch_ops.trace() as seen:
        found = gradients(call, made, "expanded")
        again = gradients(torch.compile(call, fullgraph=True), made, "expanded")
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(again, wanted)
    assert {record.backend.value for record in seen.records} == {"triton"}
