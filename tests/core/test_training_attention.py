"""Gradients of attention: right, on the backend that ran forward, of no more memory than SDPA's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import torch_ops
from tests.kept import bytes_kept
from torch_ops import Backend, DeclarationError, NoBackwardError, Platform, ops
from torch_ops.contracts import AttentionGradientContract
from torch_ops.declarations import catalogue
from torch_ops.testing.proofs._attention_gradients import left, oracle

NUMBERS = {"is_causal": True, "scale": None, "window_left": -1, "logits_soft_cap": 0.0}
FORMS: list[dict[str, Any]] = [
    {},
    {"is_causal": False, "scale": -0.3},
    {"window_left": 1, "logits_soft_cap": 2.0},
]
FORWARD, BACKWARD = ("attention_with_lse", "torch", 1), ("attention_backward", "torch", 1)


@pytest.fixture
def own_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made(dtype: torch.dtype, queries: int = 3, keys: int = 5) -> list[Tensor]:
    """Two sequences, 4 heads of queries on 2 of keys."""
    generator = torch.Generator().manual_seed(3)
    shapes = (2, queries, 4, 8), (2, keys, 2, 8), (2, keys, 2, 6)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [t.requires_grad_() for t in tensors]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (5, 3)])
def test_gradcheck(queries: int, keys: int, form: dict[str, Any]) -> None:
    """Of the result, and of result and LSE; queries without a key too."""
    tensors = made(torch.float64, queries, keys)
    numbers = tuple({**NUMBERS, **form}.values())
    call = torch.ops.torch_ops.attention_with_lse

    def both(*args: Tensor) -> Tensor:
        out, lse = call(*args, *numbers)
        shares: Tensor = lse.exp().double() * 1e-2  # the LSE is of float32, and -inf of no keys
        return torch.cat([out, shares.unsqueeze(-1)], -1)

    assert torch.autograd.gradcheck(
        lambda *args: ops.attention(*args, *numbers), tensors, fast_mode=True
    )
    # Steps and limits for the LSE in float32.
    assert torch.autograd.gradcheck(both, tensors, eps=1e-2, atol=1e-3, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_within_their_bound(dtype: torch.dtype, form: dict[str, Any]) -> None:
    """Of gradients that are expanded, transposed, steps of others, or absent."""
    numbers = {**NUMBERS, **form}
    tensors = made(dtype)
    args = dict(zip("qkv", (t.detach() for t in tensors), strict=True)) | numbers
    grads = [
        (torch.ones((), dtype=dtype).expand(2, 3, 4, 6), None),
        (
            torch.randn(6, 4, 3, 2).to(dtype).permute(3, 2, 1, 0),
            torch.randn(4, 3, 2).permute(2, 1, 0),
        ),
        (torch.randn(2, 3, 4, 12).to(dtype)[..., ::2], torch.ones(()).expand(2, 3, 4)),
        (None, torch.randn(2, 3, 8)[..., ::2]),
    ]
    for grad, grad_lse in grads:
        out, lse = ops.attention_with_lse(*tensors, **numbers)
        wanted = [(o, g) for o, g in ((out, grad), (lse, grad_lse)) if g is not None]
        found = torch.autograd.grad([o for o, _ in wanted], tensors, [g for _, g in wanted])
        given = {"grad": torch.zeros_like(out) if grad is None else grad, "grad_lse": grad_lse}
        exact = oracle({**args, **left(args), **given}, AttentionGradientContract())
        for tensor, got, output in zip(tensors, found, exact, strict=True):
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert output.bound is not None
            assert bool(((got.double() - output.value).abs() <= output.bound).all())


@pytest.mark.parametrize("op", ["attention", "attention_with_lse"])
def test_backward_runs_on_the_backend_that_ran_forward(op: str) -> None:
    """Out of the scope that chose it, with the results of calls without gradients."""
    tensors = made(torch.float32)
    with torch_ops.use_backend("torch"), torch_ops.trace() as seen:
        out = getattr(ops, op)(*tensors, True)
    first = out if op == "attention" else out[0]
    with torch_ops.trace() as later:
        torch.autograd.grad(first.sum(), tensors)
    records = [(r.op, r.backend.value, r.count) for r in (*seen.records, *later.records)]
    assert records == [FORWARD, BACKWARD]
    with torch.no_grad():
        assert torch.equal(ops.attention(*tensors, True, backend="torch"), first)


@pytest.mark.usefixtures("own_graphs")
@pytest.mark.parametrize("inline", ["auto", True])
def test_compiled_calls_keep_what_eager_ones_do(inline: Any) -> None:
    """They don't dissolve where a gradient is wanted: the reference would keep probabilities."""
    tensors = made(torch.float32)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = ops.attention(q, k, v, True) * 2
        return result

    compiled: Any = torch.compile(loss, backend="aot_eager", fullgraph=True)
    undo = torch_ops.set_inline(inline)
    found, ran = [], []
    kept: list[int] = []
    for call in (loss, compiled):
        with torch_ops.trace() as seen:
            out = call(*tensors)
            found.append(torch.autograd.grad(out.sum(), tensors))
        ran.append([(r.op, r.backend.value, r.count) for r in seen.records])
        kept.append(sum(bytes_kept(call, *tensors).values()))
    with torch.no_grad(), torch_ops.trace() as seen:
        compiled(*tensors)
    undo()
    assert ran == [[FORWARD, BACKWARD]] * 2
    assert [(r.op, r.how) for r in seen.records] == [("attention", "inlined")]
    assert kept[1] <= kept[0]
    for got, wanted in zip(*found, strict=True):
        assert torch.equal(got, wanted)


def test_no_more_is_kept_than_by_hand() -> None:
    """q, k, v, the result and the LSE, as PyTorch's flash attention does: no probabilities."""
    tensors = [torch.randn(2, 64, 4, 8, requires_grad=True) for _ in "qkv"]

    def by_hand() -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in tensors)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    theirs = bytes_kept(by_hand)
    for op in ("attention", "attention_with_lse"):
        ours = bytes_kept(getattr(ops, op), *tensors, True)
        assert {t.data_ptr() for t in tensors} <= set(ours)
        assert sum(ours.values()) <= sum(theirs.values())
        assert sum(ours.values()) == 4 * (4 * 2 * 64 * 4 * 8 + 2 * 64 * 4)


def test_calls_without_gradients_cost_what_they_did() -> None:
    tensors = [t.detach() for t in made(torch.float32)]
    with torch_ops.trace() as seen:
        assert ops.attention(*tensors, True).grad_fn is None
        with torch.no_grad():
            assert ops.attention(tensors[0].requires_grad_(), *tensors[1:]).grad_fn is None
    assert [(r.op, r.count) for r in seen.records] == [("attention", 2)]


def test_what_has_no_backward_refuses() -> None:
    tensors = made(torch.float32)
    text = "'attention': an input requires grad and backend 'inductor' doesn't have a backward"
    with pytest.raises(NoBackwardError, match=f"{text} .*backends with one: 'torch'"):
        ops.attention(*tensors, backend="inductor")
    with pytest.raises(NoBackwardError, match="op 'attention' has first derivatives only"):
        torch.autograd.grad(ops.attention(*tensors).sum(), tensors, create_graph=True)
    spec = torch_ops.registry.find("attention_with_lse", "torch")
    torch_ops.registry.unregister(spec)  # what runs forward
    try:
        with pytest.raises(NoBackwardError, match="no backend of the op has a backward"):
            ops.attention(*tensors)
    finally:
        torch_ops.registry.register(spec)


def test_a_promise_that_a_backward_does_not_make_is_in_the_refusal() -> None:
    """Sums of flash attention's gradients are in no fixed order, and a CPU has none."""
    text = "no backend of the op has a backward that is usable here: torch: .*deterministic"
    tensors = made(torch.float32)
    with torch_ops.use_backend(deterministic=True):
        found = torch_ops.explain("attention", *tensors, platform=Platform.cuda((9, 0)))
        losses = [ops.attention(*tensors).sum() for _ in range(2)]
    assert isinstance(found.error, NoBackwardError)
    assert re.search(text, str(found.error))
    first, second = (torch.autograd.grad(loss, tensors) for loss in losses)
    assert all(map(torch.equal, first, second))


def test_empty_calls_have_gradients_of_zeros() -> None:
    for shape, keys in (((0, 3, 4, 8), 5), ((2, 0, 4, 8), 5), ((2, 3, 4, 8), 0)):
        q = torch.randn(shape, requires_grad=True)
        k, v = (torch.randn(shape[0], keys, 2, 8, requires_grad=True) for _ in "kv")
        found = torch.autograd.grad(ops.attention(q, k, v, True).sum(), (q, k, v))
        for tensor, got in zip((q, k, v), found, strict=True):
            assert torch.equal(got, torch.zeros_like(tensor))


def test_a_written_input_or_result_is_noticed() -> None:
    q, k, v = made(torch.float32)
    scaled = k * 1
    out = ops.attention(q, scaled, v)
    scaled.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out = ops.attention(q, k, v)
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_declaration_refuses_another_forward() -> None:
    text = r"op 'attention': a backward whose forward is rms_norm\(.*\(accepted: an op with the"
    with pytest.raises(DeclarationError, match=text):
        catalogue()["attention"].backward(
            "attention_backward", saves=("q",), forward=catalogue()["rms_norm"]
        )


def test_explain_tells_what_runs_where_a_gradient_is_wanted() -> None:
    """It is what would run on that platform, and not what runs there without gradients."""
    tensors = made(torch.bfloat16)
    platform = Platform.cuda((9, 0))
    found = torch_ops.explain("attention", *tensors, platform=platform)
    reasons = {candidate.backend.value: candidate.reasons for candidate in found.candidates}
    assert (found.chosen, reasons["triton"][-1]) == (Backend.TORCH, "no backward")
    assert reasons["torch"] == ()
    assert found.inlining is not None
    assert not found.inlining.inlined
    with torch.no_grad():
        free = torch_ops.explain("attention", *tensors)
    assert free.inlining is not None
    assert free.inlining.inlined
    refused = torch_ops.explain("attention", *tensors, backend="inductor")
    assert isinstance(refused.error, NoBackwardError)
    assert "backend 'inductor' doesn't have a backward" in str(refused.error)
    cache, positions = torch.ones(3, 8, requires_grad=True), torch.zeros(2, dtype=torch.int64)
    rope = torch_ops.explain("apply_rope", tensors[0][0, :2], tensors[0][0, :2], cache, positions)
    assert "argument 'cos_sin_cache' requires grad" in str(rope.error)
