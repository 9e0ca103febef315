"""Eager calls that look like one before: no check, no dispatcher, and no difference to anybody."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import torch_ops
from torch_ops import NoBackwardError, declare, dynamo, ops
from torch_ops.contracts import Contract
from torch_ops.declarations import catalogue
from torch_ops.familiar import Familiar, Look

from . import samples
from .looks import RMS, WEIGHT, Shortcuts, X, known, looks_of
from .samples import OPS
from .toy import Toy

pytestmark = [
    pytest.mark.usefixtures("strangers"),
    # PyTorch's own forward mode scripts its decompositions when it is used first.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of rms_norm whose arguments are checked."""
    seen: list[tuple[Any, ...]] = []
    declaration = declare.declared["rms_norm"]
    check = declaration.checker

    def counted(*args: Any) -> None:
        seen.append(args)
        check(*args)

    monkeypatch.setattr(declaration, "checker", counted)
    return seen


def _tensors_first(op: str) -> bool:
    """Whether a call can be compared with others: its tensors come before its numbers."""
    names = catalogue()[op].tensor_arguments
    return tuple(catalogue()[op].signature.parameters)[: len(names)] == names


@pytest.mark.parametrize("op", [op for op in OPS if _tensors_first(op)])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_every_op_takes_the_short_way_to_the_same_bits(op: str, mode: Callable[[], Any]) -> None:
    """From the third call of a look on; what is written gets its version bumped as before."""
    with mode():
        args = samples.arguments(op)
        made = [samples.lay_out(args, "contiguous") for _ in range(4)]
        packet = getattr(torch.ops.torch_ops, op)
        expected = samples.outputs(op, made[0], packet(*made[0].values()))
        getattr(ops, op)(*made[1].values())
        shortcuts = Shortcuts(op)
        found = samples.outputs(op, made[2], getattr(ops, op)(**made[2]))
        assert shortcuts.count == 1
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert [t.stride() for t in found] == [t.stride() for t in expected]
        if mode is not torch.inference_mode:
            tensors = [[v for v in m.values() if isinstance(v, Tensor)] for m in (made[0], made[2])]
            assert [t._version for t in tensors[0]] == [t._version for t in tensors[1]]


@pytest.mark.parametrize("call", [ops.rms_norm, RMS, RMS.default], ids=["ops", "packet", "default"])
def test_checks_are_made_twice_a_look(checked: list[Any], call: Callable[..., Any]) -> None:
    """A shape that comes once costs no comparison to be kept."""
    for count in (1, 2, 2, 2):
        call(X, WEIGHT)
        assert len(checked) == count
    RMS.backend(X, WEIGHT, 1e-6, "torch")
    ops.rms_norm(X, weight=WEIGHT, eps=1e-6)
    assert len(checked) == 2
    with pytest.raises(ValueError, match=r"argument 'eps' is -1\.0"):
        call(X, WEIGHT, -1.0)
    with pytest.raises(ValueError, match="argument 'weight' is of shape"):
        call(X, WEIGHT[:7])


OTHERS: dict[str, tuple[Any, ...]] = {
    "shape": (X[:2], WEIGHT),
    "dtype": (X.double(), WEIGHT),
    "dtype of the weight": (X, WEIGHT.double()),
    "strides": (X.t().contiguous().t(), WEIGHT),
    "device": (X.to("meta"), WEIGHT.to("meta")),
    "type": (X, nn.Parameter(WEIGHT, requires_grad=False)),
    "number": (X, WEIGHT, 1e-3),
    "tensor left out": (X,),
}


@pytest.mark.parametrize("call", [ops.rms_norm, RMS], ids=["ops", "packet"])
@pytest.mark.parametrize("name", OTHERS)
def test_what_looks_different_is_checked(
    name: str, call: Callable[..., Any], checked: list[Any]
) -> None:
    known()
    checked.clear()
    call(*OTHERS[name])
    assert len(checked) == 1
    call(X, WEIGHT)
    assert len(checked) == 1


def test_a_shape_that_keeps_changing_its_look_is_kept_ever_more_rarely(checked: list[Any]) -> None:
    """At its second, fourth and eighth miss: to keep a look costs as much as a check."""
    kept: list[Look | None] = []
    for turn in range(40):
        ops.rms_norm(X, WEIGHT, 1e-5 if turn % 2 else 1e-6)
        (look,) = looks_of("rms_norm").values() or (None,)
        if not kept or look is not kept[-1]:
            kept.append(look)
    assert 4 <= len(kept) <= 6, "of 40"
    assert 20 <= len(checked) <= 40


def test_no_more_than_some_hundred_shapes_are_kept() -> None:
    for rows in range(300):
        for _ in range(2):
            ops.silu_and_mul(torch.ones(rows, 2))
    assert 0 < len(looks_of("silu_and_mul")) <= 256


def test_optional_tensors_that_are_left_out(checked: list[Any]) -> None:
    """By position, by name or not at all: one look; other tensors are another."""
    expected = ops.rms_norm(X, None, backend="torch")
    ways: list[Callable[[], Tensor]] = [
        lambda: ops.rms_norm(X),
        lambda: RMS(X, None),
        lambda: RMS(X),
        lambda: RMS.default(x=X),
    ]
    for way in ways:
        assert torch.equal(way(), expected)
    assert len(checked) == 2
    assert not torch.equal(ops.rms_norm(X, WEIGHT), expected)
    with pytest.raises(ValueError, match="argument 'weight' is of shape"):
        ops.rms_norm(X, WEIGHT[:7])
    bias = torch.randn(8)
    for _ in range(3):
        assert not torch.equal(ops.layer_norm(X, WEIGHT), ops.layer_norm(X, WEIGHT, bias))
        assert not torch.equal(ops.layer_norm(X, None, bias), ops.layer_norm(X, WEIGHT, bias))


def test_one_tensor_twice_looks_like_nothing(checked: list[Any]) -> None:
    vector = torch.randn(8)
    for _ in range(4):
        ops.rms_norm(vector, vector)
    assert len(checked) == 4


def test_policy_scope_debug_and_trace_are_obeyed(toy: Toy) -> None:
    for backend, value in (("torch", 1.0), ("inductor", 2.0), ("triton", 3.0)):
        toy.serve(backend, value)
    for _ in range(3):
        assert toy() == 1
    assert looks_of("toy")
    with torch_ops.use_backend("triton"):
        assert toy() == 3
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(toy).result() == 1
    undo = torch_ops.set_backend(toy="inductor")
    assert toy() == 2
    undo()
    with torch_ops.trace() as seen:
        assert toy() == 1
        assert toy("triton") == 3
    assert [(r.backend.value, r.source, r.count) for r in seen.records] == [
        ("torch", "declared", 1),
        ("triton", "call", 1),
    ]
    negative = -torch.ones(2, 3)
    ops.toy(negative)
    with torch_ops.debug(), pytest.raises(ValueError, match="negative elements"):
        ops.toy(negative)


def test_what_was_legal_in_no_grad_is_refused_in_grad_mode() -> None:
    parameter = nn.Parameter(WEIGHT.clone())
    with torch.no_grad():
        shortcuts = known("rms_norm_quant_fp8", X, parameter)
        ops.rms_norm_quant_fp8(X, parameter)
    assert shortcuts.count == 1
    for call in (ops.rms_norm_quant_fp8, torch.ops.torch_ops.rms_norm_quant_fp8):
        with pytest.raises(NoBackwardError, match="an input requires grad"):
            call(X, parameter)
    with torch.inference_mode():
        ops.rms_norm_quant_fp8(X, parameter)


def test_what_was_familiar_in_no_grad_has_a_gradient_in_grad_mode() -> None:
    parameter = nn.Parameter(WEIGHT.clone())
    with torch.no_grad():
        shortcuts = known("rms_norm", X, parameter)
        assert not ops.rms_norm(X, parameter).requires_grad
    for call in (ops.rms_norm, RMS):
        assert call(X, parameter).grad_fn is not None
    assert shortcuts.count == 1


def test_tangents_are_refused() -> None:
    shortcuts = known()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        for call in (ops.rms_norm, RMS):
            with pytest.raises(NoBackwardError):
                call(dual, WEIGHT)
        ops.rms_norm(X, WEIGHT)
    assert shortcuts.count == 2, "the level alone is no reason"


def test_memory_is_compared_at_every_call() -> None:
    """No look tells where tensors lie."""
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    known("fused_add_rms_norm_", x, residual, WEIGHT)
    both = torch.randn(4, 8)
    before = both.clone()
    for call in (ops.fused_add_rms_norm_, torch.ops.torch_ops.fused_add_rms_norm_):
        with pytest.raises(ValueError, match="argument 'x' is at offset 0 of the storage"):
            call(both[:3], both[1:], WEIGHT)
    assert torch.equal(both, before)


# ------------------------------------------------------------------ what it rests on


@pytest.mark.parametrize("lacking", [AttributeError, TypeError])
def test_without_the_comparison_every_call_is_checked(
    lacking: type[Exception], monkeypatch: pytest.MonkeyPatch, checked: list[Any]
) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise lacking("TensorGuards")

    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", missing)
    for _ in range(4):
        assert torch.equal(ops.rms_norm(X, WEIGHT), RMS(X, WEIGHT))
    assert len(checked) == 8
    assert not looks_of("rms_norm")


def test_the_comparison_is_there_on_this_torch() -> None:
    same = dynamo.resembling([X, WEIGHT])
    assert same is not None
    assert same(X.clone(), WEIGHT)
    for x in (X[:2], X.double(), X.to("meta"), X.t().contiguous().t(), nn.Parameter(X), None):
        assert not same(x, WEIGHT)
    assert not same(X, X)
    assert dynamo.resembling([X, X]) is None


@pytest.mark.usefixtures("declaring")
def test_an_op_whose_tensors_do_not_come_first_has_no_looks() -> None:
    @declare.op(contract=Contract())
    def test_familiar_late(n: int, x: Tensor) -> Tensor:
        return x * n

    familiar = Familiar(declare.declared["test_familiar_late"])
    for _ in range(4):
        familiar.meet((2, X), print)
    assert not familiar.looks
    assert "_looked" not in inspect.getclosurevars(ops.test_familiar_late).nonlocals


def test_threads_agree() -> None:
    """Eight threads of three looks each: every result is that of its own call."""

    def work(seed: int) -> bool:
        ok = True
        for turn in range(60):
            width = 4 + (seed + turn) % 3
            x = torch.full((2, width), float(seed + 1))
            ok &= torch.equal(ops.rms_norm(x, torch.ones(width)), RMS(x, torch.ones(width)))
        return ok

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
