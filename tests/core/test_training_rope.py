"""Gradients of rotary embeddings: those of the results, rotated back by the same kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops
from tests.kept import kept
from torch_ops import DeclarationError, NoBackwardError, ops
from torch_ops.declarations import catalogue
from torch_ops.testing.arithmetic import rounding

Pair = tuple[Tensor, Tensor]
POSITIONS = (3, 0, 10, 3, 7)


@pytest.fixture
def own_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made(dtype: torch.dtype, rotary_dim: int = 8, width: torch.dtype = torch.int64) -> list[Any]:
    """Five tokens with 4 heads of queries and 2 of keys, of 8 elements."""
    generator = torch.Generator().manual_seed(7)
    q, k = (torch.randn(5, n, 8, generator=generator).to(dtype) for n in (4, 2))
    angles = torch.rand(11, rotary_dim // 2, generator=generator) * 6
    cache = torch.cat([angles.cos(), angles.sin()], -1)
    return [q.requires_grad_(), k.requires_grad_(), cache, torch.tensor(POSITIONS, dtype=width)]


def by_hand(x: Tensor, grad: Tensor, cache: Tensor, is_neox: bool) -> tuple[Tensor, Tensor]:
    """The gradient in float64, by the transposed matrix of each token, and its bound.

    A rotated element is a sum of two products, of cosines and sines that are exact: it errs by
    ``3 a`` of their magnitudes, and rounds once.
    """
    half, size = cache.shape[1] // 2, x.shape[-1]
    matrices = torch.eye(size, dtype=torch.float64).repeat(len(POSITIONS), 1, 1)
    for token, position in enumerate(POSITIONS):
        cos, sin = cache[position].double().split(half)
        for i in range(half):
            a, b = (i, i + half) if is_neox else (2 * i, 2 * i + 1)
            matrices[token, a, a] = matrices[token, b, b] = cos[i]
            matrices[token, a, b], matrices[token, b, a] = -sin[i], sin[i]
    unit, wide = rounding(x.dtype), grad.double()
    exact, size_of = wide @ matrices, wide.abs() @ matrices.abs()
    return exact, exact.abs() * unit.u + 3 * unit.acc * size_of + unit.eta


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [8, 4, 0])
def test_gradcheck_of_any_order(rotary_dim: int, is_neox: bool) -> None:
    """A rotation is linear: the gradient of its gradient is the rotation itself."""
    q, k, cache, positions = made(torch.float64, rotary_dim, torch.int32)

    def call(q: Tensor, k: Tensor) -> Pair:
        result: Pair = ops.apply_rope(q, k, cache, positions, is_neox)
        return result

    assert torch.autograd.gradcheck(call, (q, k), fast_mode=rotary_dim != 4)
    assert torch.autograd.gradgradcheck(call, (q, k), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_neox", [True, False])
def test_gradients_are_within_their_bound(dtype: torch.dtype, is_neox: bool) -> None:
    """Of parts of heads, and of gradients that are expanded, transposed or absent."""
    q, k, cache, positions = made(dtype, 6)
    one = torch.linspace(-1, 2, 8).to(dtype)
    grads = [
        (one.expand(5, 4, 8), one[:1].expand(5, 2, 8)),
        (
            torch.randn(8, 4, 5).to(dtype).permute(2, 1, 0),
            torch.randn(2, 5, 8).to(dtype).movedim(0, 1),
        ),
        (torch.randn(5, 8, 8).to(dtype)[:, ::2], torch.zeros(5, 2, 8, dtype=dtype)),
    ]
    for grad_q, grad_k in grads:
        outs = ops.apply_rope(q, k, cache, positions, is_neox)
        found = torch.autograd.grad(outs, (q, k), (grad_q, grad_k))
        for x, got, grad in ((q, found[0], grad_q), (k, found[1], grad_k)):
            exact, bound = by_hand(x, grad, cache, is_neox)
            assert (got.dtype, got.shape) == (x.dtype, x.shape)
            assert bool(((got.double() - exact).abs() <= bound).all())
    out, _ = ops.apply_rope(q, k, cache, positions, is_neox)
    alone = torch.autograd.grad(out, (q, k), grads[0][0])
    assert torch.equal(alone[1], torch.zeros_like(k))


@pytest.mark.usefixtures("own_graphs")
@pytest.mark.parametrize("inline", ["auto", False])
def test_compiled_gradients_are_those_of_eager_code(inline: Any) -> None:
    q, k, cache, positions = made(torch.float64, 6)
    compiled: Callable[..., Pair] = torch.compile(
        ops.apply_rope, backend="aot_eager", fullgraph=True
    )
    undo = torch_ops.set_inline(inline)
    found, ran = [], []
    for call in (ops.apply_rope, compiled):
        with torch_ops.trace() as seen:
            out_q, out_k = call(q, k, cache, positions, False)
            found.append(torch.autograd.grad((out_q**2).sum() + out_k.sum(), (q, k)))
        ran.append([(r.op, r.backend.value, r.source, r.how) for r in seen.records])
    undo()
    by = [("apply_rope", "torch", source, "ran") for source in ("call", "forward")]
    dissolved = [("apply_rope", "torch", "declared", "inlined")]
    assert ran == [by, dissolved if inline == "auto" else by]
    for got, wanted in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, wanted)


def test_backward_runs_on_the_backend_that_ran_forward() -> None:
    """Whatever has an apply_rope has its backward; this one stands in Inductor's place."""
    target = "torch_ops.backends.torch.apply_rope:apply_rope"
    torch_ops.registry.unregister(torch_ops.registry.find("apply_rope", "inductor"))
    torch_ops.register_kernel(torch_ops.KernelSpec("apply_rope", "inductor", target))
    q, k, cache, positions = made(torch.float32)
    with torch_ops.use_backend("inductor"):
        out = ops.apply_rope(q, k, cache, positions)[0].sum()
    with torch_ops.trace() as seen:
        found = torch.autograd.grad(out, q)
    assert [(r.op, r.backend.value) for r in seen.records] == [("apply_rope", "inductor")]
    wanted = torch.autograd.grad(ops.apply_rope(q, k, cache, positions)[0].sum(), q)
    torch.testing.assert_close(found, wanted)


def test_nothing_of_queries_and_keys_is_kept() -> None:
    q, k, cache, positions = made(torch.bfloat16)
    found = kept(ops.apply_rope, q, k, cache, positions)
    assert [tensor.data_ptr() for tensor in found] == [cache.data_ptr(), positions.data_ptr()]


@pytest.mark.usefixtures("own_graphs")
def test_a_cache_has_no_gradient() -> None:
    q, k, cache, positions = made(torch.float32)
    text = (
        r"op 'apply_rope': argument 'cos_sin_cache' requires grad, and the op has gradients of "
        r"'q', 'k' alone \(accepted: cos_sin_cache.detach\(\), or calls under torch.no_grad\(\)"
    )
    compiled: Callable[..., Pair] = torch.compile(
        ops.apply_rope, backend="aot_eager", fullgraph=True
    )
    cache.requires_grad_()
    for call in (ops.apply_rope, torch.ops.torch_ops.apply_rope):
        with pytest.raises(NoBackwardError, match=text):
            call(q, k, cache, positions)
    with pytest.raises(Exception, match="argument 'cos_sin_cache' requires grad"):
        compiled(q, k, cache, positions)
    with torch.no_grad():
        assert not ops.apply_rope(q, k, cache, positions)[0].requires_grad
    assert ops.apply_rope(q, k, cache.detach(), positions)[0].requires_grad


def test_a_declaration_refuses_constants_that_it_lacks() -> None:
    with pytest.raises(DeclarationError, match=r"constants \['x'\] \(accepted: .*'cos_sin_cache'"):
        catalogue()["apply_rope"].backward("apply_rope", saves=(), constants=("x",))


@pytest.mark.parametrize("tokens", [0, 2])
def test_empty_calls_have_empty_gradients(tokens: int) -> None:
    q = torch.empty(tokens, 4, 8, requires_grad=True)
    k = torch.empty(tokens, 0, 8, requires_grad=True)
    places = torch.zeros(tokens, dtype=torch.int64)
    outs = ops.apply_rope(q, k, torch.ones(3, 8), places)
    for x, got in zip((q, k), torch.autograd.grad(outs, (q, k), outs), strict=True):
        assert got.shape == x.shape


def test_written_queries_are_refused_as_before() -> None:
    q, k, cache, positions = made(torch.float32)
    with pytest.raises(NoBackwardError, match="op 'apply_rope_': an input requires grad"):
        ops.apply_rope_(q, k, cache, positions)
