"""PyTorch's flash attention as the ops call it: on a model of its kernels, and on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention as sdpa
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import torch_ops
from tests.kept import bytes_kept
from torch_ops import ops
from torch_ops.contracts import AttentionGradientContract
from torch_ops.declarations import catalogue
from torch_ops.testing.proofs._attention_gradients import left, oracle
from torch_ops.testing.registered import registered
from torch_ops.testing.spec import Spec

from . import examples

HALVES = ("float16", "bfloat16")
OPS = ("attention_with_lse", "attention_backward")
SHAPES = [  # batch, queries, keys, heads, key heads, head_dim
    (2, 5, 5, 4, 2, 16), (1, 3, 9, 3, 3, 8), (2, 1, 7, 6, 2, 24), (1, 129, 257, 4, 1, 64),
]  # fmt: skip


def readable(*tensors: Tensor) -> None:
    """Refuse rows that can't be read in vectors of 16 bytes, as the kernels can't."""
    for tensor in tensors:
        steps = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
        assert tensor.stride(-1) == 1
        assert tensor.data_ptr() % 16 == 0
        assert not any(step % 16 for step in steps)


def seen_by(queries: int, keys: int, is_causal: bool, left: int, right: int) -> Tensor:
    """Tell which keys the kernels show: around the query's own, on both sides."""
    if is_causal:
        right = 0
    if left >= 0 and right < 0:
        right = keys
    place = torch.arange(queries).unsqueeze(1) + keys - queries
    key = torch.arange(keys).unsqueeze(0)
    after, before = key > place + right, key < place - left
    return ~((after & (right >= 0)) | (before & (left >= 0)))


def probabilities(
    q: Tensor, k: Tensor, scale: float | None, seen: Tensor
) -> tuple[Tensor, Tensor, float]:
    """Give logits ``[B, H, S, N]``, keys by query head, and the scale; -inf is what isn't seen."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    keys = k.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], 1).float()
    logits = q.transpose(1, 2).float() @ keys.mT * factor
    return logits.masked_fill(~seen, -math.inf), keys, factor


def forward(
    q: Tensor, k: Tensor, v: Tensor, bounds_q: None, bounds_k: None, queries: int, keys: int,
    dropout: float, is_causal: bool, debug: bool, *,
    scale: float | None, window_size_left: int, window_size_right: int,
) -> tuple[Any, ...]:  # fmt: skip
    """Tell what the forward kernel gives, rounding where it does; its LSE is ``[B, H, S]``.

    It is infinite where weights add up to NaN.
    """
    assert (bounds_q, bounds_k, dropout, debug) == (None, None, 0.0, False)
    assert (queries, keys) == (q.shape[1], k.shape[1])
    readable(q, k, v)
    seen = seen_by(queries, keys, is_causal, window_size_left, window_size_right)
    logits, _, _ = probabilities(q, k, scale, seen)
    p = (logits - logits.amax(-1, keepdim=True)).exp()
    values = v.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], 1).float()
    out = p.to(q.dtype).float() @ values / p.sum(-1, keepdim=True)
    state = torch.zeros(2, dtype=torch.uint64)
    out = out.to(q.dtype).transpose(1, 2)
    lse = torch.logsumexp(logits, -1)
    return out, lse.masked_fill(lse.isnan(), math.inf), state, state, torch.empty(0)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    bounds_q: None, bounds_k: None, queries: int, keys: int, dropout: float, is_causal: bool,
    seed: Tensor, offset: Tensor, *,
    scale: float | None, window_size_left: int, window_size_right: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Tell what the backward kernel gives, rounding where it does.

    It has probabilities of the LSE, and sums of rows of the rounded output; both operands of a
    product are of the input's dtype, and so are a query head's shares in what is added up.
    """
    assert (bounds_q, bounds_k, dropout) == (None, None, 0.0)
    assert (queries, keys) == (q.shape[1], k.shape[1])
    assert (lse.dtype, lse.is_contiguous()) == (torch.float32, True)
    assert lse.shape == (q.shape[0], q.shape[2], queries)
    assert seed.dtype == offset.dtype == torch.uint64
    readable(grad, q, k, v, out)
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    seen = seen_by(queries, keys, is_causal, window_size_left, window_size_right)
    logits, by_head, factor = probabilities(q, k, scale, seen)
    values = v.transpose(1, 2).repeat_interleave(group, 1).float()
    rows, results, wide = (t.transpose(1, 2).float() for t in (grad, out, q))
    p = torch.exp(logits - lse.unsqueeze(-1))
    ds = p * (rows @ values.mT - (rows * results).sum(-1, keepdim=True))
    ds = ds.to(dtype).float()
    shares = (ds.mT @ wide * factor, p.to(dtype).float().mT @ rows)
    summed = (t.to(dtype).unflatten(1, (-1, group)).float().sum(2) for t in shares)
    return tuple(t.to(dtype).transpose(1, 2) for t in (ds @ by_head * factor, *summed))


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names the kernels that run, with models of them in their places."""
    ran: list[str] = []

    def noted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            ran.append(name)
            return kernel(*args, **kwargs)

        return call

    aten = SimpleNamespace(
        _flash_attention_forward=noted("forward", forward),
        _flash_attention_backward=noted("backward", backward),
    )
    module = examples.part("torch", "_flash")
    monkeypatch.setattr(module, "_aten", aten)
    monkeypatch.setattr(module, "_has_flash", lambda x: True)
    return ran


def made(shape: tuple[int, ...], dtype: torch.dtype, device: Any = "cpu") -> list[Tensor]:
    batch, queries, keys, heads, kv_heads, size = shape
    shapes = (batch, queries, heads, size), *[(batch, keys, kv_heads, size)] * 2
    tensors = [torch.randn(s, device=device).to(dtype) for s in shapes]
    return [t.requires_grad_() for t in tensors]


def check(tensors: list[Tensor], grad: Tensor, is_causal: bool) -> None:
    """Compare the gradients of a call on `torch` with float64."""
    out = ops.attention(*tensors, is_causal, backend="torch")
    found = torch.autograd.grad(out, tensors, grad)
    args: dict[str, Any] = dict(zip("qkv", (t.detach().cpu() for t in tensors), strict=True))
    args |= {"is_causal": is_causal, "scale": None, "window_left": -1, "logits_soft_cap": 0.0}
    given = {**left(args), "grad": grad.cpu(), "grad_lse": None}
    for got, output in zip(
        found, oracle({**args, **given}, AttentionGradientContract()), strict=True
    ):
        assert output.bound is not None
        assert bool(((got.cpu().double() - output.value).abs() <= output.bound).all())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_forward_and_backward_are_flash_attention(
    flash: list[str], shape: tuple[int, ...], is_causal: bool
) -> None:
    tensors = made(shape, torch.bfloat16)
    check(tensors, torch.ones((), dtype=torch.bfloat16).expand(tensors[0].shape), is_causal)
    assert flash == ["forward", "backward"]


def plain(op: str, dtype: str) -> list[Spec]:
    """The kit's examples of the covering array, in the form that flash attention has."""
    found = []
    for spec in examples.covering(op, dtype):
        params = spec.param | {"logits_soft_cap": 0.0}
        operands = {name: o for name, o in spec.operand.items() if name != "grad_lse"}
        found.append(spec.replace(params=params, operands=operands))
    return found


@pytest.mark.parametrize("op", OPS)
def test_any_layout_is_made_readable(flash: list[str], op: str) -> None:
    own = plain(op, "float16")
    tally = examples.examine(registered(op, "torch"), op, own, laws=False)
    assert tally.executed == len(own)
    assert len(flash) >= len(own) // 2  # the others have queries without a key


@pytest.mark.parametrize(
    "change",
    [
        {"window_left": 3, "queries": 9, "is_causal": False}, {"logits_soft_cap": 2.0},
        {"scale": -0.5}, {"scale": 0.0},
        {"dtype": torch.float32}, {"dtype": torch.float64}, {"head_dim": 12}, {"head_dim": 264},
        {"value_dim": 8}, {"queries": 9}, {"queries": 0}, {"keys": 0}, {"batch": 0},
        {"batch": 65536, "head_dim": 8},
    ],
    ids=str,
)  # fmt: skip
def test_other_calls_are_the_references(flash: list[str], change: dict[str, Any]) -> None:
    sizes = {"batch": 1, "queries": 2, "keys": 4, "head_dim": 16, "value_dim": None} | change
    numbers = {"is_causal": True, "scale": None, "window_left": -1, "logits_soft_cap": 0.0}
    numbers |= {name: value for name, value in change.items() if name in numbers}
    dtype, size = change.get("dtype", torch.float16), sizes["head_dim"]
    q = torch.randn(sizes["batch"], sizes["queries"], 1, size).to(dtype)
    k = torch.randn(sizes["batch"], sizes["keys"], 1, size).to(dtype)
    v = torch.randn(*k.shape[:3], sizes["value_dim"] or size).to(dtype)
    found = ops.attention_with_lse(q, k, v, **numbers, backend="torch")
    wanted = catalogue()["attention_with_lse"].reference(q, k, v, *numbers.values())
    assert not flash
    for got, exact in zip(found, wanted, strict=True):
        assert torch.equal(got, exact)


def test_nan_is_no_infinity(flash: list[str]) -> None:
    q, k, v = made(SHAPES[0], torch.float16)
    with torch.no_grad():
        q[0, 1, 2, 3] = math.nan
        out, lse = ops.attention_with_lse(q, k, v, backend="torch")
    assert flash == ["forward"]
    poisoned = torch.zeros(lse.shape, dtype=torch.bool)
    poisoned[0, 1, 2] = True
    assert torch.equal(lse.isnan(), poisoned)
    assert torch.equal(out.isnan().all(-1), poisoned)
    assert bool(lse[~poisoned].isfinite().all())


def test_a_gradient_of_the_lse_is_the_formulas(flash: list[str]) -> None:
    tensors = made(SHAPES[0], torch.float16)
    out, lse = ops.attention_with_lse(*tensors, True)
    torch.autograd.grad(lse.sum(), tensors, retain_graph=True)
    assert flash == ["forward"]
    torch.autograd.grad(out.sum(), tensors)
    assert flash == ["forward", "backward"]


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.version.hip is not None,
        reason="no NVIDIA GPU on this machine",
    ),
]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("marked", [pytest.param(None, marks=gpu)])
def test_right_on_a_gpu(op: str, dtype: str, marked: None) -> None:
    own = [*plain(op, dtype), *examples.covering(op, dtype)]
    tally = examples.examine(registered(op, "torch"), op, own, device="cuda", laws=False)
    assert tally.executed == len(own)


@pytest.mark.parametrize("is_causal", [False, pytest.param(True)])
@pytest.mark.parametrize("marked", [pytest.param(None, marks=gpu)])
def test_gradients_on_a_gpu(is_causal: bool, marked: None) -> None:
    """Of every shape, by default: no other backend of a GPU has a backward."""
    for shape in SHAPES:
        for dtype in (torch.float16, torch.bfloat16):
            tensors = made(shape, dtype, "cuda")
            check(tensors, torch.randn_like(tensors[0]), is_causal)
            with torch_ops.trace() as seen:
                ops.attention(*tensors, is_causal)
            assert [(r.op, r.backend.value) for r in seen.records] == [(OPS[0], "torch")]


@pytest.mark.parametrize("marked", [pytest.param(None, marks=gpu)])
def test_the_kernels_of_sdpa_run_on_a_gpu_and_as_much_is_kept(marked: None) -> None:
    tensors = made((2, 512, 512, 8, 8, 64), torch.bfloat16, "cuda")

    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa.sdpa_kernel(sdpa.SDPBackend.FLASH_ATTENTION):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    names, sizes = [], []
    for call in (by_hand, lambda *args: ops.attention(*args, True, backend="torch")):
        sizes.append(sum(bytes_kept(call, *tensors).values()))
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            torch.autograd.grad(call(*tensors).sum(), tensors)
            torch.cuda.synchronize()
        names.append({e.name.split("<")[0] for e in seen.events() if "flash" in e.name})
    assert names[0] == names[1] != set()
    assert sizes[1] <= sizes[0]
