"""Ops that dissolve in compiled graphs: code, values, switches, choices that change, caches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import torch_ops
from tests.cases.kernels import judge
from torch_ops import (
    Platform,
    TorchOpsError,
    UnknownOpError,
    UnknownVariableError,
    buckets,
    counting,
    declare,
    inductor,
    inlined,
    inlining,
    ops,
    tuning,
)
from torch_ops.declarations import catalogue
from torch_ops.tuning import Row, Table

from . import samples
from .conftest import Python

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")
WEIGHT = torch.linspace(0.5, 1.5, 64)
CPU = Platform.cpu()


def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    y, residual = ops.fused_add_rms_norm(x * 3, residual, WEIGHT)
    return ops.silu_and_mul(torch.ops.torch_ops.rms_norm(y + 1, None, 1e-5)), residual


def written(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The same by hand."""
    residual = x * 3 + residual
    wide = residual.float()
    y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * WEIGHT).to(x.dtype)
    wide = (y + 1).float()
    z = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
    gate, value = z.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * value).to(x.dtype), residual


def code_of(function: Callable[..., Any], *args: Any, **how: Any) -> tuple[Any, str]:
    compiled = torch.compile(function, fullgraph=True, **how)
    found, (source, *others) = run_and_get_code(compiled, *args)
    assert not others
    return found, source


def kernels_in(source: str) -> int:
    return source[source.index("def call(") :].count("cpp_fused")


def names_op(source: str) -> bool:
    return "torch.ops.torch_ops" in source


# ------------------------------------------------------------------ code and values


@pytest.mark.parametrize(
    "dynamic", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.exhaustive])]
)
def test_as_many_kernels_as_by_hand(dynamic: bool) -> None:
    """No call of an op; compiled whole; what the contract rounds is rounded."""
    x, residual = (torch.randn(32, 64, dtype=torch.bfloat16) for _ in range(2))
    found, source = code_of(block, x, residual, dynamic=dynamic)
    _, by_hand = code_of(written, x, residual, dynamic=dynamic)
    assert not names_op(source)
    assert kernels_in(source) == kernels_in(by_hand) >= 1
    wide = block(x.double(), residual.double())
    rounding = torch.finfo(torch.bfloat16).eps
    for out, exact in zip(found, wide, strict=True):
        assert out.dtype == torch.bfloat16
        # Four roundings lie between; each is at most half of eps, and the norms keep the scale.
        assert (
            (out - exact).abs() <= 4 * rounding * (exact.abs() + exact.abs().amax(-1, True))
        ).all()


def test_promised_roundings_stay_where_neighbours_fuse() -> None:
    """Fused code alone would normalize and quantize what nobody stores."""

    def sums(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        out, _ = ops.fused_add_rms_norm(x.float().to(x.dtype), residual, WEIGHT)
        return (out, *ops.silu_and_mul_quant_fp8(residual))

    for dtype in (torch.bfloat16, torch.float16):
        x, residual = (torch.randn(200, 64, dtype=dtype) for _ in range(2))
        found, source = code_of(sums, x, residual)
        assert not names_op(source)
        out, q, scale = sums(x, residual)
        # The order of a sum in float32 may move a value over a rounding's border, rarely.
        assert (found[0] != out).float().mean() < 1e-3
        assert (found[1].float() != q.float()).float().mean() < 1e-3
        torch.testing.assert_close(found[2], scale, rtol=1e-6, atol=0)


PROVEN = [
    op
    for op in samples.OPS
    if not catalogue()[op].mutates
    and any(spec.backend.value == "inductor" for spec in torch_ops.registry.get(op))
    and "attention" not in op  # `attention` compiles for long; autocast's test below has it
]


@pytest.mark.slow
def test_what_dissolves_keeps_the_bounds_of_its_op() -> None:
    """All in one graph, bfloat16 where they take it, by the oracles of all kernels."""
    narrow = {op: torch.bfloat16 in catalogue()[op].dtypes for op in PROVEN}
    calls = {
        op: samples.arguments(op, 5, torch.bfloat16 if narrow[op] else torch.float32)
        for op in PROVEN
    }

    def every(calls: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return {op: getattr(ops, op)(**args) for op, args in calls.items()}

    found, source = code_of(every, calls)
    assert not names_op(source)
    for op, args in calls.items():
        judge(op, tuple(args.values()), samples.outputs(op, args, found[op]))


def test_layers_compiled_one_by_one_share_a_graph() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor) -> Any:
            return x + ops.rms_norm(x, self.weight) * 2

    counter = CompileCounterWithBackend("aot_eager")
    layers = torch.nn.ModuleList(Layer() for _ in range(3)).requires_grad_(False)
    x = expected = torch.randn(5, 16)
    for layer in layers:
        expected = layer(expected)
        layer.compile(backend=counter, fullgraph=True)
    for layer in layers:
        x = layer(x)
    assert torch.equal(x, expected)
    assert counter.frame_count == 1
    assert targets(counter) == {"torch_ops_inlined.rms_norm.default"}


def targets(counter: CompileCounterWithBackend) -> set[str]:
    """Operators of ours in all graphs."""
    seen = {str(node.target) for graph in counter.graphs for node in graph.graph.nodes}
    return {name for name in seen if name.startswith("torch_ops")}


def codes(counter: CompileCounterWithBackend) -> list[str]:
    return [graph.code for graph in counter.graphs]


def counted(function: Callable[..., Any], **how: Any) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, **how), counter


def test_an_op_whose_reference_is_not_proven_dissolves_on_demand() -> None:
    """`test_compile.py` has those that dissolve by themselves, every op of them."""
    call, counter = counted(torch.ops.torch_ops.scaled_mm_int8, dynamic=True)
    args = samples.arguments("scaled_mm_int8", 7)
    expected = call(*args.values())
    assert targets(counter) == {"torch_ops.scaled_mm_int8"}
    torch_ops.set_inline(scaled_mm_int8=True)
    assert torch.equal(call(*args.values()), expected)
    assert "torch_ops_inlined.scaled_mm_int8.default" in targets(counter)
    torch_ops.set_inline(scaled_mm_fp8=True)
    assert reason("scaled_mm_fp8").endswith("its backend 'torch' isn't the reference")


def test_calls_by_name_by_packet_and_by_overload_dissolve_alike() -> None:
    packet, x = torch.ops.torch_ops.rms_norm, torch.randn(3, 64)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: packet(x, eps=1e-3, weight=WEIGHT),
        lambda x: packet.default(x, WEIGHT, 1e-3),
        lambda x: packet.backend(x, WEIGHT, 1e-3, "torch"),
        lambda x: packet.backend(x, backend="torch", weight=WEIGHT, eps=1e-3),
        lambda x: packet(x, WEIGHT, 1e-3, "torch"),
        lambda x: ops.rms_norm(x, WEIGHT, 1e-3, backend="torch"),
    ]
    for call in calls:
        compiled, counter = counted(call)
        assert torch.equal(compiled(x), ops.rms_norm(x, WEIGHT, 1e-3))
        assert targets(counter) == {"torch_ops_inlined.rms_norm.default"}
    compiled, counter = counted(lambda x: packet.backend(x, WEIGHT, 1e-3, "inductor"))
    compiled(x)
    assert targets(counter) == {"torch_ops.rms_norm.backend"}


def test_inside_of_checkpoints_and_conditions() -> None:
    def both(x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, ops.rms_norm, lambda x: x * 2, (x,))
        kept: Tensor = torch.utils.checkpoint.checkpoint(ops.rms_norm, y, use_reentrant=False)
        return kept

    for sign in (1, -1):
        x = sign * torch.rand(3, 8)
        found, source = code_of(both, x)
        torch.testing.assert_close(found, both(x))
        assert not names_op(source)


def test_autocast_changes_nothing() -> None:
    compiled, _ = counted(ops.attention)
    q = torch.randn(1, 3, 2, 8)
    expected = ops.attention(q, q, q)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(q, q, q), expected)


@pytest.mark.exhaustive
def test_training_goes_through_the_reference() -> None:
    """Of what dissolves; any other call has its backward, as in eager code."""
    sizes = ((9, 64), (9, 64), (64,))
    leaves = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]

    def loss(norm: Callable[..., Any], add: Callable[..., Any], *args: Tensor) -> Any:
        x, residual, weight = args
        y, residual = add(norm(x, weight) * 2, residual, weight)
        y += 1
        return (y.sin() * residual).sum()

    def step(*args: Tensor) -> Any:
        return loss(ops.rms_norm, ops.fused_add_rms_norm, *args)

    references = [catalogue()[op].reference for op in ("rms_norm", "fused_add_rms_norm")]
    loss(*references, *leaves).backward()  # type: ignore[arg-type]
    compiled = torch.compile(step, fullgraph=True)
    _, sources = run_and_get_code(lambda: compiled(*copies).backward())
    assert len(sources) == 2
    assert not any(map(names_op, sources))
    for found, expected in zip(copies, leaves, strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    with torch_ops.trace() as seen:
        compiled(*copies)
    ways = [(r.op, r.backend.value, r.count, r.how) for r in seen.records]
    assert ways == [(op, "torch", 1, "inlined") for op in ("rms_norm", "fused_add_rms_norm")]
    torch_ops.set_inline(False)
    for leaf in copies:
        leaf.grad = None
    with torch_ops.trace() as seen:
        compiled(*copies).backward()
    assert [r.count for r in seen.records if r.op == "rms_norm_backward"] == [2]
    for found, expected in zip(copies, leaves, strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_export_keeps_the_call() -> None:
    class Norm(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return ops.rms_norm(x)

    for strict in (False, True):
        program = torch.export.export(Norm(), (torch.randn(3, 8),), strict=strict)
        assert "torch.ops.torch_ops.rms_norm" in program.graph_module.code


# ------------------------------------------------------------------ who decides


def reason(op: str = "rms_norm", **how: Any) -> str:
    found = torch_ops.explain(op, *samples.arguments(op).values(), **how).inlining
    assert found is not None
    return f"{found.inlined}: {found.reason}"


def test_what_decides_is_explained() -> None:
    assert reason() == "True: auto: backend 'torch' (declared)"
    assert reason(backend="torch") == "True: auto: backend 'torch' (call)"
    assert reason(backend="inductor") == "False: auto: backend 'inductor' (call)"
    assert reason("paged_decode").startswith("False: auto: it has no backend 'inductor'")
    assert reason("fused_add_rms_norm_") == "False: auto: it writes its arguments"
    with torch_ops.use_backend("inductor"):
        assert reason() == "False: auto: backend 'inductor' (scope)"
        torch_ops.set_inline(True)
        assert reason() == "False: True by set_inline: backend 'inductor' (scope)"
    assert reason("paged_decode") == "True: True by set_inline: backend 'torch' (declared)"
    undo = torch_ops.set_inline(rms_norm=False)
    assert reason() == "False: False by set_inline"
    undo()
    with torch_ops.debug():
        assert reason().endswith("debug() checks every call")
    with torch_ops.use_backend(deterministic=True):
        assert "(deterministic by use_backend), fused code doesn't" in reason()
    text = str(torch_ops.explain("rms_norm", torch.ones(2, 8)))
    assert "compiled graphs: it dissolves: True by set_inline" in text
    assert torch_ops.explain("rms_norm").inlining is None


def test_on_a_gpu_a_kernel_that_is_preferred_stays_one_call() -> None:
    gpu = Platform.cuda((9, 0))
    found = torch_ops.explain("rms_norm", torch.ones(2, 8), platform=gpu)
    assert found.chosen == "triton"
    assert found.inlining == (False, "auto: backend 'triton' (declared)")
    torch_ops.set_inline(rms_norm=True)
    assert inlining.decide("rms_norm", None, None, gpu).inlined
    assert not inlining.decide("rms_norm", None, "triton", gpu).inlined


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (
        ("false", (False, "TORCH_OPS_INLINE")),
        ("0, rms_norm=true", (True, "TORCH_OPS_INLINE")),
        ("silu_and_mul=1", ("auto", "by default")),
    ):
        monkeypatch.setenv("TORCH_OPS_INLINE", text)
        torch_ops.refresh()
        assert inlining.switches("rms_norm") == expected
    undo = torch_ops.set_inline(silu_and_mul=False)
    torch_ops.set_inline("auto", silu_and_mul=None)
    assert inlining.switches("silu_and_mul") == (True, "TORCH_OPS_INLINE")
    assert inlining.switches("rms_norm") == ("auto", "set_inline")
    undo()
    for text, message in (
        ("maybe", r"says 'maybe' \(accepted: '0', '1', 'auto', 'false', 'true', for one op op="),
        ("rms_nrm=1", "unknown op 'rms_nrm'.*Did you mean 'rms_norm'"),
        ("fused_add_rms_norm_=true", "op 'fused_add_rms_norm_' writes its arguments"),
    ):
        monkeypatch.setenv("TORCH_OPS_INLINE", text)
        torch_ops.refresh()
        with pytest.raises(UnknownVariableError, match=message) as raised:
            ops.rms_norm(torch.ones(2, 8))
        assert raised.value.variable == "TORCH_OPS_INLINE"


def test_equal_switches_are_taken_back_one_by_one() -> None:
    first, second, third = (torch_ops.set_inline(mode) for mode in (False, True, False))
    third()
    assert inlining.switches("rms_norm") == (True, "set_inline")
    first()
    first()
    assert inlining.switches("rms_norm") == (True, "set_inline")
    second()
    assert not inlining._process


def test_bad_switches_change_nothing() -> None:
    with pytest.raises(TypeError, match="mode must be 'auto', True, False or None, received 'on'"):
        torch_ops.set_inline("on")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"rms_norm must be 'auto', .* received 1"):
        torch_ops.set_inline(rms_norm=1)  # type: ignore[arg-type]
    with pytest.raises(UnknownOpError, match=r"no op 'rms_nrm' is declared.*Did you mean"):
        torch_ops.set_inline(rms_nrm=True)
    with pytest.raises(TorchOpsError, match=r"'apply_rope_' writes 'q', 'k' and stays one call"):
        torch_ops.set_inline(apply_rope_=True)
    assert not inlining._process


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Measured orders of rms_norm by number of rows, of 64 elements each."""

    def loaded(**fastest: str) -> None:
        rows = {}
        for name, backend in fastest.items():
            other = {"torch": "inductor", "inductor": "torch"}[backend]
            x = torch.empty(int(name.removeprefix("rows")), 64)
            bucket = buckets.bucket(catalogue()["rms_norm"], (x,))
            rows[bucket] = Row(bucket, {backend: 1.0, other: 2.0})
        kernels = tuning.fingerprint(["rms_norm"])
        device = tuning.device_name(CPU)
        found = {"rms_norm": rows}
        made = Table(Path("made"), device, tuning.versions(), kernels, found, "made")
        torch_ops.policy.change(lambda: tuning._loaded.update({made.device: made}))

    yield loaded
    torch_ops.clear_tuning_table()


def test_a_table_decides_by_the_sizes_of_a_graph(table: Callable[..., None]) -> None:
    table(rows4="torch", rows8="inductor")
    for rows, dissolves in ((4, True), (8, False), (3, True), (2, True)):
        torch._dynamo.reset()
        call, counter = counted(ops.rms_norm, dynamic=False)
        call(torch.randn(rows, 64))
        assert ("torch_ops_inlined.rms_norm.default" in targets(counter)) == dissolves
        found = torch_ops.explain("rms_norm", torch.randn(rows, 64)).inlining
        assert found is not None
        assert found.inlined == dissolves
    for fastest, dissolves in (({"rows8": "inductor"}, False), ({"rows8": "torch"}, True)):
        torch._dynamo.reset()
        table(rows4="torch", **fastest)
        call, counter = counted(ops.rms_norm, dynamic=True)
        for rows in (4, 8, 9):
            call(torch.randn(rows, 64))
        wanted = "torch_ops_inlined" if dissolves else "torch_ops"
        assert [code for code in codes(counter) if "rms_norm" in code] == codes(counter)[-1:]
        assert f"torch.ops.{wanted}.rms_norm.default(" in codes(counter)[-1]


# ------------------------------------------------------------------ changes


def test_changes_are_followed_and_going_back_compiles_nothing() -> None:
    call, counter = counted(lambda x: ops.silu_and_mul(ops.rms_norm(x)))
    x = torch.randn(3, 8)
    expected = call(x)
    for _ in range(3):
        undo = torch_ops.set_inline(rms_norm=False)
        torch.testing.assert_close(call(x), expected)
        undo()
        with torch_ops.use_backend("inductor"):
            torch.testing.assert_close(call(x), expected)
        with torch_ops.debug():
            torch.testing.assert_close(call(x), expected)
        torch_ops.set_inline(silu_and_mul=True)  # what the graph is already
        torch.testing.assert_close(call(x), expected)
    seen = [
        sorted(str(n.target) for n in g.graph.nodes if "torch_ops" in str(n.target))
        for g in counter.graphs
    ]
    inside, outside = "torch_ops_inlined.{}.default", "torch_ops.{}.default"
    assert seen == [
        [inside.format("rms_norm"), inside.format("silu_and_mul")],
        [outside.format("rms_norm"), inside.format("silu_and_mul")],
        [outside.format("rms_norm"), outside.format("silu_and_mul")],
        [outside.format("rms_norm"), outside.format("silu_and_mul")],
    ]


def test_debug_checks_what_has_dissolved(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*args: Any) -> None:
        raise ValueError("checked")

    call, _ = counted(ops.rms_norm)
    x = torch.randn(3, 8)
    call(x)
    with torch_ops.debug():
        call(x)
        monkeypatch.setattr(declare.declared["rms_norm"], "checker", check)
        with pytest.raises(ValueError, match="checked"):
            call(x)
    call(x)


def test_without_graph_finalizers_ops_stay_calls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._dynamo.output_graph import OutputGraph

    monkeypatch.delattr(OutputGraph, "add_graph_finalizer")
    monkeypatch.setattr(counting, "_lacking", None)  # traces would tell of it ever after
    call, counter = counted(ops.rms_norm)
    with caplog.at_level(logging.INFO, "torch_ops"):
        call(torch.randn(3, 8))
    assert targets(counter) == {"torch_ops.rms_norm.default"}
    assert "no op is fused or dissolves in compiled graphs: AttributeError" in caplog.text


def test_without_a_part_of_inductor_a_rounding_is_a_copy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor import lowering

    rounding = torch.ops.torch_ops_compiled.rounded.default
    monkeypatch.setattr(inductor, "_met", inductor._met - {rounding})
    monkeypatch.delitem(lowering.lowerings, rounding, raising=False)

    def missing(operator: object) -> None:
        raise AttributeError("module 'torch._inductor.lowering' has no attribute 'x'")

    monkeypatch.setattr(inductor, "_register_rounding", missing)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        caplog.at_level(logging.INFO, "torch_ops"),
    ):
        found, source = code_of(lambda x: ops.fused_add_rms_norm(x, x, WEIGHT), x)
    assert "torch.ops.torch_ops_compiled.rounded.default(" in source
    assert "compiled graphs call torch_ops_compiled.rounded.default itself: " in caplog.text
    assert torch.equal(found[1], x + x)


def test_a_rounding_elsewhere_is_what_it_was_given() -> None:
    x = torch.randn(3, dtype=torch.bfloat16, requires_grad=True)
    assert inlined.rounded(x) is x
    rounding = torch.ops.torch_ops_compiled.rounded.default
    torch.library.opcheck(rounding, (x,))


# ------------------------------------------------------------------ caches


CACHED = """
import contextlib, json, os
import torch, torch_ops
from torch._dynamo.utils import counters
from torch_ops import buckets, tuning
from torch_ops.declarations import catalogue

x, weight = torch.arange(24.0).view(3, 8), torch.ones(8)


def called():
    return torch_ops.ops.rms_norm(x, weight) + 1


def table(stack):
    bucket = buckets.bucket(catalogue()["rms_norm"], (x, weight, 1e-6))
    rows = {"rms_norm": [tuning.Row(bucket, {"torch": 2.0, "inductor": 1.0})]}
    device = tuning.device_name(torch_ops.Platform.cpu())
    with open("table.json", "w") as file:
        json.dump(tuning.written(device, rows), file)
    torch_ops.load_tuning_table("table.json")
    stack.callback(torch_ops.clear_tuning_table)


def alone(stack):
    os.environ.pop("TORCH_OPS_BACKEND")
    torch_ops.refresh()


WAYS = {
    "started": lambda stack: None,
    "alone": alone,
    "scope": lambda stack: stack.enter_context(torch_ops.use_backend(rms_norm="acme")),
    "process": lambda stack: stack.callback(torch_ops.set_backend(rms_norm="acme")),
    "table": table,
}
for way in os.environ["WAYS"].split():
    torch._dynamo.reset()
    counters.clear()
    with contextlib.ExitStack() as stack, torch_ops.trace() as seen:
        WAYS[way](stack)
        found = torch.compile(called)()
        how = {"inlined": "dissolved"}
        ran = [how.get(record.how, record.backend.value) for record in seen.records]
        torch.testing.assert_close(found, called())
    hits = counters["inductor"]["fxgraph_cache_hit"]
    hits += counters["aot_autograd"]["autograd_cache_hit"]
    print(way, *ran, "cached" if hits else "compiled", end=", ")
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_shared_cache_serves_no_graph_of_another_choice(python: Python, tmp_path: Path) -> None:
    """Whoever has chosen in whichever process: results follow, and equal choices share a graph."""

    def run(ways: str, **env: str) -> list[str]:
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        names = () if (tmp_path / "other-site").exists() else ("acme",)
        found = python(CACHED, *names, WAYS=ways, **cache, **env)
        return found.removesuffix(", ").split(", ")

    assert run("started") == ["started dissolved compiled"]
    assert run("started scope", TORCH_OPS_INLINE="false") == [
        "started torch compiled",
        "scope acme cached",  # one graph for all that is called
    ]
    assert run("started scope table") == [
        "started dissolved cached",
        "scope acme compiled",
        "table inductor compiled",
    ]
    assert run("started alone process table", TORCH_OPS_BACKEND="rms_norm=acme") == [
        "started acme cached",
        "alone dissolved cached",
        "process acme cached",
        "table inductor cached",
    ]
