"""Pairs of calls that one op computes: bits, what isn't fused and why, choices, the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

import torch_ops
from torch_ops import fusion, ops, pairs

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "opaque", "one_thread")
WEIGHT, FIVE = torch.linspace(0.5, 1.5, 64), torch.linspace(0.5, 1.5, 5)
SILU = torch.nn.SiLU(inplace=True)


def norm_quant(x: Tensor, residual: Tensor, eps: float = 1e-5, **how: Any) -> Any:
    return ops.quantize_fp8_per_token(ops.rms_norm(x, WEIGHT, eps, **how), **how)


def add_norm_quant(x: Tensor, residual: Tensor, eps: float = 1e-5, **how: Any) -> Any:
    y, total = ops.fused_add_rms_norm(x, residual, WEIGHT, eps, **how)
    return (*ops.quantize_fp8_per_token(y, **how), total * 2)


def silu_quant(x: Tensor, residual: Tensor, eps: float = 1e-5, **how: Any) -> Any:
    return ops.quantize_fp8_per_token(ops.silu_and_mul(x, **how), **how)


def add_norm(x: Tensor, residual: Tensor, eps: float = 1e-5, **how: Any) -> Any:
    total = x + residual
    return torch.ops.torch_ops.rms_norm(total, WEIGHT, eps), total + 1


def all_of_them(x: Tensor, residual: Tensor, eps: float = 1e-5, **how: Any) -> Any:
    total = torch.add(residual, x)
    q = ops.quantize_fp8_per_token(ops.rms_norm(total, WEIGHT, eps))
    return (*q, *ops.quantize_fp8_per_token(ops.silu_and_mul(total)))


def in_groups(x: Tensor, residual: Tensor, eps: float = 1e-5, **how: Any) -> Any:
    y, total = ops.fused_add_rms_norm(x, residual, WEIGHT, eps)
    z = ops.quantize_fp8_per_group(ops.rms_norm(x, WEIGHT, eps), 64)
    gated = ops.quantize_fp8_per_group(ops.silu_and_mul(x), group_size=16)
    return (*ops.quantize_fp8_per_group(y, 32), total * 2, *z, *gated)


def by_a_scale(x: Tensor, residual: Tensor, eps: float = 1e-5, **how: Any) -> Any:
    scale = residual.abs().amax().float() / 100
    y, total = ops.fused_add_rms_norm(x, residual, WEIGHT, eps)
    z = ops.quantize_fp8_per_tensor(ops.rms_norm(x, WEIGHT, eps), scale)
    gated = ops.quantize_fp8_per_tensor(ops.silu_and_mul(x), scale=scale.view(1))
    return (*ops.quantize_fp8_per_tensor(y, scale), total * 2, *z, *gated)


QUANTIZED = ("fused_add_rms_norm_quant_fp8", "rms_norm_quant_fp8", "silu_and_mul_quant_fp8")
PAIRS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "norm_quant": (norm_quant, ["rms_norm_quant_fp8"]),
    "add_norm_quant": (add_norm_quant, ["fused_add_rms_norm_quant_fp8"]),
    "silu_quant": (silu_quant, ["silu_and_mul_quant_fp8"]),
    "add_norm": (add_norm, ["fused_add_rms_norm"]),
    "in_groups": (in_groups, [f"{op}_per_group" for op in QUANTIZED]),
    "by_a_scale": (by_a_scale, [f"{op}_per_tensor" for op in QUANTIZED]),
    "all_of_them": (all_of_them, ["fused_add_rms_norm_quant_fp8", "silu_and_mul_quant_fp8"]),
}


def compiled(function: Callable[..., Any], **how: Any) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, **how), counter


def called(counter: CompileCounterWithBackend) -> list[str]:
    """Ours in the last graph, in its order."""
    targets = [str(node.target) for node in counter.graphs[-1].graph.nodes]
    return [name.removeprefix("torch_ops.") for name in targets if name.startswith("torch_ops.")]


def same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def inputs(rows: int = 5, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 64, dtype=dtype), torch.randn(rows, 64, dtype=dtype)


@pytest.mark.parametrize("name", PAIRS)
def test_the_bits_are_those_of_two_calls(name: str) -> None:
    """For both narrow dtypes, any eps, sizes that vary, and without a graph more."""
    function, expected = PAIRS[name]
    for dtype in (torch.bfloat16, torch.float16):
        call, counter = compiled(function, dynamic=True)
        for rows in (5, 9):
            args = inputs(rows, dtype)
            same(call(*args, 1e-3), function(*args, 1e-3))
        assert called(counter) == [f"{op}.default" for op in expected]
        assert sum("torch_ops" in graph.code for graph in counter.graphs) == 1


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("norm_quant", "torch"),
        ("add_norm_quant", "torch"),
        ("silu_quant", "torch"),
        ("norm_quant", "inductor"),
    ],
)
def test_the_backend_that_both_calls_name_runs(name: str, backend: str) -> None:
    function, (op,) = PAIRS[name]
    call, counter = compiled(lambda *args: function(*args, backend=backend))
    args = inputs()
    with torch_ops.trace() as seen:
        found = call(*args)
    same(found, function(*args, backend=backend))
    assert called(counter) == [f"{op}.backend"]
    assert [(r.op, r.backend.value, r.source) for r in seen.records] == [(op, backend, "call")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("columns", [64, 4096, 5120, 8192])
def test_the_bits_are_those_of_two_calls_on_a_gpu(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, expected = PAIRS[name]
    monkeypatch.setitem(globals(), "WEIGHT", torch.randn(columns, device="cuda"))
    for dtype in (torch.bfloat16, torch.float16):
        call, counter = compiled(function)
        for rows in (5, 700):
            x, residual = (torch.randn(rows, columns, dtype=dtype, device="cuda") for _ in range(2))
            same(call(x, residual, 1e-3), function(x, residual, 1e-3))
        assert called(counter) == [f"{op}.default" for op in expected]


def test_the_fused_call_follows_the_policy() -> None:
    """Of the two ops, not its own, where nobody chose for it; and none where somebody did."""
    call, counter = compiled(norm_quant)
    args = inputs()
    one, literal = ["rms_norm_quant_fp8.default"], ["rms_norm_quant_fp8.backend"]
    two = ["rms_norm.default", "quantize_fp8_per_token.default"]
    call(*args)
    assert called(counter) == one
    with torch_ops.use_backend(rms_norm="inductor", quantize_fp8_per_token="inductor"):
        same(call(*args), norm_quant(*args))
        assert called(counter) == literal
    with torch_ops.use_backend(rms_norm="inductor"), fusion.record() as seen:
        same(call(*args), norm_quant(*args))
        assert called(counter) == two
    reason = "not one backend: rms_norm runs on 'inductor'; quantize_fp8_per_token runs on 'torch'"
    assert [pair.reason for pair in seen] == [reason]
    with torch_ops.use_backend(rms_norm_quant_fp8="inductor"), fusion.record() as seen:
        same(call(*args), norm_quant(*args))
        assert called(counter) == two
    assert seen[0].reason == "scope chose 'inductor' for rms_norm_quant_fp8, not 'torch'"
    undo, made = fusion.disable("rms_norm_quant_fp8"), counter.frame_count
    call(*args)
    assert called(counter) == two
    assert counter.frame_count == made + 1
    undo()
    for _ in range(2):
        fusion.disable("silu_and_mul_quant_fp8")
        call(*args)
    assert counter.frame_count == made + 1, "going back compiles nothing"


def test_a_backend_without_the_fused_op_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_OPS_DISABLE", "rms_norm_quant_fp8:torch")
    torch_ops.refresh()
    call, counter = compiled(norm_quant)
    with fusion.record() as seen:
        call(*inputs())
    assert called(counter) == ["rms_norm.default", "quantize_fp8_per_token.default"]
    text = "backend 'torch' of the calls: op 'rms_norm_quant_fp8': backend 'torch', chosen by call"
    assert seen[0].reason.startswith(text)


def _two_users(x: Tensor, residual: Tensor) -> Any:
    y = ops.rms_norm(x, WEIGHT)
    return (*ops.quantize_fp8_per_token(y), y)


def _a_view(x: Tensor, residual: Tensor) -> Any:
    return ops.quantize_fp8_per_token(ops.rms_norm(x, WEIGHT).view(-1, 2, 32))


def _other_names(x: Tensor, residual: Tensor) -> Any:
    return ops.quantize_fp8_per_token(ops.rms_norm(x, WEIGHT, backend="torch"))


def _no_weight(x: Tensor, residual: Tensor) -> Any:
    return ops.quantize_fp8_per_token(ops.rms_norm(x))


def _mixed(x: Tensor, residual: Tensor) -> Any:
    return (ops.rms_norm(x + residual.float(), WEIGHT),)


def _broadcast(x: Tensor, residual: Tensor) -> Any:
    return (ops.rms_norm(x + residual[:1], WEIGHT),)


def _written(x: Tensor, residual: Tensor) -> Any:
    total = x + residual
    total.mul_(2)
    return ops.rms_norm(total, WEIGHT), total


def _twice(x: Tensor, residual: Tensor) -> Any:
    total = x[0] + residual[0]
    return (ops.rms_norm(total, total),)


def _late_weight(x: Tensor, residual: Tensor) -> Any:
    total = x + residual
    early = total * 3
    weight = WEIGHT * 2
    return ops.rms_norm(total, weight), early


def _computed_scale(x: Tensor, residual: Tensor) -> Any:
    return ops.quantize_fp8_per_tensor(ops.rms_norm(x, WEIGHT))


def _written_scale(x: Tensor, residual: Tensor) -> Any:
    scale = residual.amax().float()
    y = ops.rms_norm(x, WEIGHT)
    scale.mul_(2)
    return ops.quantize_fp8_per_tensor(y, scale)


def _relu(x: Tensor, residual: Tensor) -> Any:
    total = x + residual
    functional.relu(total, inplace=True)
    return ops.rms_norm(total, WEIGHT), total


def _silu(x: Tensor, residual: Tensor) -> Any:
    total = x + residual
    SILU(total)
    return ops.rms_norm(total, WEIGHT), total


def _dunder(x: Tensor, residual: Tensor) -> Any:
    copy, scale = x.clone(), residual.amax().float()
    y = ops.rms_norm(copy, WEIGHT)
    copy.__iadd__(1)
    return ops.quantize_fp8_per_tensor(y, scale * 2)


def _statistics(x: Tensor, residual: Tensor) -> Any:
    mean, scale = WEIGHT * 1, residual.amax().float()
    y = ops.rms_norm(x, mean)
    functional.batch_norm(residual.float(), mean, torch.ones(64), training=True)
    return ops.quantize_fp8_per_tensor(y, scale * 2)


def _grad_mode(x: Tensor, residual: Tensor) -> Any:
    with torch.no_grad():
        gated = ops.silu_and_mul(x)
    return ops.quantize_fp8_per_token(gated)


def _rotated_and_appended(x: Tensor, residual: Tensor) -> Any:
    places, angles = torch.arange(5), torch.linspace(0, 1, 5 * 32).view(5, 32)
    q, k = ops.apply_rope(x.view(5, 2, 32), residual[:, None, :32], angles, places)
    caches = x.new_zeros(2, 4, 1, 32), x.new_zeros(2, 4, 1, 32)
    ops.append_paged_kv_(k, residual[:, None, 32:], *caches, places)
    return q, *caches


def _turned(x: Tensor, residual: Tensor) -> Any:
    return (ops.rms_norm(x.t() + residual.t(), FIVE),)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_two_users, "output takes what lies between, too"),
        (_a_view, "'view' lies between"),
        (_other_names, "the calls name different backends: 'torch' and none"),
        (_no_weight, "weight is None, which rms_norm_quant_fp8 doesn't take"),
        (_mixed, "op 'fused_add_rms_norm': argument 'residual' is torch.float32"),
        (_broadcast, "op 'fused_add_rms_norm': argument 'residual' is of shape [1, 64]"),
        (_written, "mul_ writes between the two"),
        (_twice, "rms_norm_default takes what lies between twice"),
        (_late_weight, "weight is made after early takes what total gives"),
        (_computed_scale, "scale is None, which rms_norm_quant_fp8_per_tensor doesn't take: one"),
        (_written_scale, "mul_ writes between the two"),
        (_relu, "relu writes between the two"),
        (_silu, "silu writes between the two"),
        (_dunder, "iadd writes between the two"),
        (_statistics, "batch_norm writes between the two"),
        (_grad_mode, "_set_grad_enabled_1 lies between the two"),
        (_rotated_and_appended, "output isn't known to take what isn't contiguous"),
        (_turned, "the sum isn't contiguous, and that of the fused op is"),
    ],
)
def test_what_is_not_fused_and_why(function: Callable[..., Any], reason: str) -> None:
    call, counter = compiled(function)
    args = inputs()
    with fusion.record() as seen:
        found = call(*args)
    same(found, function(*args))
    assert not any("fused" in name or "quant_fp8" in name for name in called(counter))
    (pair,) = seen
    assert not pair.fused
    assert pair.reason.startswith(reason)
    assert pair.place.rpartition(":")[0] == __file__
    assert pair in fusion.report()
    assert str(pair).startswith(f"{pair.name}: {' + '.join(pair.calls)} at {__file__}:")


def test_sums_of_kernels_with_other_bits_stay() -> None:
    gpu = torch_ops.Platform.cuda((9, 0))
    found = pairs.PASSES["fused_add_rms_norm"]
    for backend, fused in (("triton", True), ("torch", True)):
        assert (pairs.serving(found, gpu, (backend,))[0] is not None) == fused
    _, reason = pairs.serving(found, gpu, ("flashinfer",))
    assert "flashinfer" in reason


def test_a_pair_that_wants_gradients_is_refused_as_ever() -> None:
    call, _ = compiled(norm_quant)
    x, residual = inputs()
    with pytest.raises(Exception, match="an input requires grad"):
        call(x.requires_grad_(), residual)


def test_what_lies_beside_the_two_may_read() -> None:
    def function(x: Tensor, residual: Tensor) -> Any:
        total = x + residual
        other = functional.relu(x) + functional.dropout(residual, training=False)
        return ops.rms_norm(total, WEIGHT), other, residual.square()

    call, counter = compiled(function)
    args = inputs()
    same(call(*args), function(*args))
    assert any("fused_add_rms_norm" in name for name in called(counter))


def test_fused_calls_dissolve_too() -> None:
    torch_ops.set_inline("auto")
    call, counter = compiled(norm_quant)
    args = inputs()
    same(call(*args), norm_quant(*args))
    code = counter.graphs[-1].code
    assert "torch.ops.torch_ops_inlined.rms_norm_quant_fp8.default(" in code


def test_passes_that_are_unknown_and_traced_code() -> None:
    with pytest.raises(ValueError, match=r"no pass 'rms_norm_quant'.*Did you mean 'rms_norm_quan"):
        fusion.disable("rms_norm_quant")
    with pytest.raises(Exception, match=r"fusion\.disable can't be entered inside code"):
        torch.compile(lambda x: (fusion.disable(), x)[1], fullgraph=True)(torch.ones(1))
    undo = fusion.disable()
    assert fusion._disabled == [frozenset(fusion.PASSES)]
    undo()
    undo()
    assert not fusion._disabled


def test_equal_passes_are_switched_on_one_by_one() -> None:
    first, second = fusion.disable("rms_norm_quant_fp8"), fusion.disable("rms_norm_quant_fp8")
    second()
    second()
    assert fusion._disabled == [{"rms_norm_quant_fp8"}]
    first()
    assert not fusion._disabled
