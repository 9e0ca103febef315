"""Derivatives and other transforms of PyTorch: refused with words or right, never zeros."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, grad, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from torch_ops import DeclarationError, NoBackwardError, TorchOpsError, ops, trace
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


EXACT: dict[str, Any] = {"rtol": 0, "atol": 0, "equal_nan": True}
# PyTorch's tanh of what fills no vector is another function's.
VECTORS: dict[str, dict[str, Any]] = {"gelu_tanh_and_mul_backward": {"rtol": 1e-6, "atol": 1e-6}}


@pytest.mark.parametrize("op", FUNCTIONAL)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_right(op: str) -> None:
    function, x = of_first(op)
    stacked = torch.stack([x, x + 1])
    expected = torch.stack([function(x), function(x + 1)])
    torch.testing.assert_close(vmap(function)(stacked), expected, **VECTORS.get(op, EXACT))


ROWS = [op for op in samples.OPS if catalogue()[op].rows is not None]


def _of_rows(op: str, backend: str | None) -> tuple[Callable[..., Any], list[Tensor]]:
    """An op as a function of the arguments that have rows: what it returns, or has written."""
    declaration, args = catalogue()[op], samples.arguments(op)
    assert declaration.rows is not None
    names = [name for name in declaration.rows.names if isinstance(args[name], Tensor)]

    def function(*given: Tensor) -> Any:
        made = args | dict(zip(names, given, strict=True))
        found = getattr(ops, op)(**made, backend=backend)
        return tuple(made[name] for name in declaration.mutates) if declaration.mutates else found

    return function, [args[name] for name in names]


@pytest.mark.parametrize("op", ROWS)
@pytest.mark.filterwarnings("error")
def test_vmap_over_rows_is_one_call(op: str) -> None:
    for backend, dim in ((None, 0), ("torch", 1), (None, -1)):
        function, args = _of_rows(op, backend)
        others = [arg.flip(0) for arg in args]
        expected = [function(*(a.clone() for a in each)) for each in (args, others)]
        stacked = [torch.stack(pair, dim) for pair in zip(args, others, strict=True)]
        with trace() as seen:
            found = vmap(function, in_dims=dim, out_dims=0)(*stacked)
        assert sum(record.count for record in seen.records) == 1
        if isinstance(found, Tensor):
            found, expected = [found], [[each] for each in expected]
        for made, wanted in zip(found, zip(*expected, strict=True), strict=True):
            assert made.dtype == wanted[0].dtype
            torch.testing.assert_close(made, torch.stack(wanted), **VECTORS.get(op, EXACT))


def test_vmap_where_one_argument_alone_is_batched() -> None:
    x, y = torch.randn(3, 4, 8), torch.randn(4, 8)
    found, total = vmap(ops.fused_add_rms_norm, in_dims=(0, None, None))(x, y, torch.ones(8))
    for i in range(3):
        norm, rest = ops.fused_add_rms_norm(x[i], y, torch.ones(8))
        assert torch.equal(found[i], norm)
        assert torch.equal(total[i], rest)
    with pytest.warns(UserWarning, match="'rms_norm': vmap over an argument without rows calls it"):
        found = vmap(ops.rms_norm)(x, y[:3])
    assert torch.equal(found, torch.stack([ops.rms_norm(x[i], y[i]) for i in range(3)]))


def test_vmap_of_vmap_and_below_compile(fresh_dynamo: None) -> None:
    x = torch.randn(3, 2, 4, 8)
    expected = ops.rms_norm(x)
    assert torch.equal(vmap(vmap(ops.rms_norm))(x), expected)
    twice = vmap(lambda a: ops.rms_norm(a) * 2, in_dims=1, out_dims=1)
    found = torch.compile(twice, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, expected * 2)


def test_vmap_of_a_rotation_in_place_takes_positions_that_are_shared() -> None:
    cache, positions = torch.randn(9, 8), torch.arange(4)
    for dim in (0, 1, -1):  # of the last two no rows are a view
        q, k = torch.randn(3, 4, 2, 8).movedim(0, dim), torch.randn(3, 4, 1, 8).movedim(0, dim)
        q, k = q.clone(), k.clone()
        pairs = zip(q.unbind(dim), k.unbind(dim), strict=True)
        wanted = [ops.apply_rope(*pair, cache, positions) for pair in pairs]
        rotate = functools.partial(ops.apply_rope_, cos_sin_cache=cache, positions=positions)
        vmap(rotate, in_dims=dim, out_dims=None)(q, k)
        for found, each in zip((q, k), zip(*wanted, strict=True), strict=True):
            assert torch.equal(found, torch.stack(each, dim))


@pytest.mark.parametrize(
    ("call", "shapes", "text"),
    [
        (ops.silu_and_mul, [(4,)], "'silu_and_mul': argument 'x' is of shape [] (accepted"),
        (ops.rms_norm, [(2,)], "'rms_norm': argument 'x' is of shape [] (accepted"),
        (ops.min_p_filter, [(3, 5, 8), (3,)], "argument 'min_p' is of shape [] (accepted: [5]"),
        (lambda q: ops.attention(q, q, q), [(3, 4, 2, 8)], "'q' is of shape [4, 2, 8] (accepted"),
    ],
)
def test_vmap_refuses_what_one_call_would(
    call: Callable[..., Any], shapes: list[tuple[int, ...]], text: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        vmap(call)(*map(torch.ones, shapes))


def test_vmap_of_an_empty_batch_gives_nothing() -> None:
    found = vmap(lambda q: ops.attention_with_lse(q, q, q))(torch.ones(0, 1, 4, 2, 8))
    assert [tuple(out.shape) for out in found] == [(0, 1, 4, 2, 8), (0, 1, 4, 2)]
    assert vmap(ops.rms_norm)(torch.ones(0, 5, 8), torch.ones(0, 8)).shape == (0, 5, 8)
    x = torch.ones(0, 5, 8)
    vmap(ops.fused_add_rms_norm_, (0, 0, None), out_dims=None)(x, x.clone(), torch.ones(8))


def test_vmap_of_what_dissolves_is_one_call(fresh_dynamo: None) -> None:
    sizes = []

    def forward(graph: torch.fx.GraphModule, _: object) -> Any:
        sizes.append(len(graph.graph.nodes))
        return graph

    for batch in (2, 64, 0):
        call = torch.compile(vmap(ops.rms_norm), backend=aot_autograd(fw_compiler=forward))
        x = torch.randn(batch, 4, 8)
        assert torch.equal(call(x), ops.rms_norm(x))
    assert max(sizes[:2]) < 12


def test_rows_of_no_argument_are_no_declaration() -> None:
    for op, names, wrong in (
        ("rms_norm", ("y",), "accepted: names out of ['x', 'weight'], of what is written all: []"),
        ("rms_norm", (), "batch() (accepted"),
        ("fused_add_rms_norm_", ("x",), "of what is written all: ['x', 'residual']"),
    ):
        with pytest.raises(DeclarationError, match=re.escape(wrong)):
            catalogue()[op].batch(*names)


def test_vmap_of_what_an_op_writes() -> None:
    weight, x = torch.ones(8), torch.randn(2, 3, 8)

    def call(x: Tensor, r: Tensor) -> None:
        ops.fused_add_rms_norm_(x, r, weight)

    with pytest.raises(TorchOpsError, match="argument 'residual', which is written, isn't batched"):
        vmap(call, in_dims=(0, None))(x, x[0].clone())
    kept = x.clone()
    with pytest.raises(RuntimeError, match="Batching rule not implemented for torch_ops::append"):
        vmap(ops.append_paged_kv_)(*(x[:, :, None] for _ in range(4)), torch.zeros(2, 3).int())
    assert torch.equal(x, kept)


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
