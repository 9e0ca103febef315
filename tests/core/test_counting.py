"""Compiled graphs in a trace: what dissolves, is fused or replayed counts at each run."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import torch_ops
from tests.replays import cudagraphs
from torch_ops import Backend, Trace, counting, dynamo, ops, set_inline, tracing

from .toy import Toy

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")
WEIGHT = torch.linspace(0.5, 1.5, 8)
X = torch.randn(3, 8)


def block(x: Tensor) -> Tensor:
    out: Tensor = ops.silu_and_mul(ops.rms_norm(torch.ops.torch_ops.rms_norm(x), WEIGHT))
    return out


def counts(seen: Trace) -> dict[tuple[str, str, str, str], int]:
    return {(r.op, r.backend.value, r.source, r.how): r.count for r in seen.records}


def test_what_has_dissolved_counts_at_each_run_of_older_code() -> None:
    """Nested traces, too. `test_inlining.py` has code of Inductor's."""
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    compiled(X)
    with torch_ops.trace() as outer:
        compiled(X)
        with torch_ops.trace() as inner:
            compiled(X)
        compiled(X)
    compiled(X)
    norm, gate = (op_of("rms_norm"), op_of("silu_and_mul"))
    assert counts(outer) == {norm: 6, gate: 3}
    assert counts(inner) == {norm: 2, gate: 1}
    assert not outer.uncounted
    assert json.loads(outer.to_json()) == {
        "records": [
            {
                "op": record.op,
                "backend": "torch",
                "source": "declared",
                "count": count,
                "skipped": [list(pair) for pair in record.skipped],
                "how": "inlined",
            }
            for record, count in zip(outer.records, (6, 3), strict=True)
        ],
        "fused": [],
        "uncounted": [],
    }


def op_of(
    op: str, backend: str = "torch", source: str = "declared", how: str = "inlined"
) -> tuple[str, str, str, str]:
    return op, backend, source, how


def test_the_source_and_what_was_passed_over_are_told() -> None:
    compiled: Callable[..., Tensor] = torch.compile(ops.rms_norm, backend="eager", fullgraph=True)
    named = torch.compile(lambda x: ops.rms_norm(x, backend="torch"), backend="eager")
    with torch_ops.trace() as seen:
        with torch_ops.use_backend("torch"):
            compiled(X)
        named(X)
        undo = set_inline(rms_norm=False)
        compiled(X)
        undo()
    assert counts(seen) == {
        op_of("rms_norm", source="scope"): 1,
        op_of("rms_norm", source="call"): 1,
        op_of("rms_norm", how="ran"): 1,
    }
    forced = {"cpu": ("inductor", "torch")}
    declaration = ops.rms_norm.declaration
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(declaration, "order", declaration.order | forced)
        undo = set_inline(rms_norm=True)
        with torch_ops.trace() as seen:
            compiled(X)
        undo()
    (record,) = seen.records
    assert record.backend is Backend.TORCH
    assert ("inductor", "inlined: True by set_inline: backend 'inductor' (declared)") in (
        record.skipped
    )


def test_code_that_is_not_traced_is_pytorchs_own() -> None:
    """The frame finds the function that PyTorch gave it; it runs no Python of ours more."""
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    compiled(X)
    globals_before = {k: v for k, v in globals().items() if k.startswith("__compiled_fn")}
    before = frames(lambda: compiled(X))
    with torch_ops.trace():
        assert frames(lambda: compiled(X)) - before
        assert globals_before != {k: globals()[k] for k in globals_before}
    compiled(X)  # the guard looks at what the change of policy made
    assert globals_before == {k: globals()[k] for k in globals_before}
    assert globals_before
    assert frames(lambda: compiled(X)) == before


def frames(call: Callable[[], Any]) -> Counter[str]:
    """Python functions of ours that a call runs."""
    entered: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "torch_ops/" in frame.f_code.co_filename.replace("\\", "/"):
            entered.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Counter(entered)


def test_a_counted_call_runs_one_frame_more(toy: Toy) -> None:
    """It can't be many: one counts a microsecond with what little they do, see the benchmark."""
    toy.serve("torch", 1)
    x = torch.ones(2, 3)

    def call() -> object:
        return torch.ops.torch_ops.toy(x)

    for _ in range(5):
        call()
    untraced = frames(call)
    with torch_ops.trace() as seen:
        for _ in range(5):
            call()
        traced = frames(call)
    assert traced - untraced == Counter({tracing.counted.__qualname__ + ".<locals>.noted": 1})
    assert [r.count for r in seen.records] == [6]


def test_replays_are_named_by_what_was_recorded(toy: Toy) -> None:
    """Recorded before the trace or in it; each size by what it goes to."""
    toy.serve("torch", 1, supports=lambda x, n: "small" if x.shape[0] < 4 else None)
    toy.serve("inductor", 2)
    compiled = torch.compile(lambda x: ops.toy(ops.toy(x)), backend=cudagraphs, dynamic=True)
    two, four = torch.ones(2, 3), torch.ones(4, 3)
    compiled(two)
    compiled(four)
    with torch_ops.trace() as seen:
        compiled(two)
        compiled(four)
        compiled(four)
        with torch_ops.use_backend("inductor"):
            compiled(four)
            compiled(four)
    small = (("torch", "small"),)
    assert [(r.backend.value, r.source, r.count, r.how, r.skipped) for r in seen.records] == [
        ("inductor", "declared", 2, "replayed", small),
        ("torch", "declared", 4, "replayed", ()),
        ("inductor", "scope", 2, "ran", ()),
        ("inductor", "scope", 2, "replayed", ()),
    ]
    assert not seen.uncounted


def test_what_cannot_be_told_is_said_instead_of_counted(toy: Toy) -> None:
    def supports(x: Tensor, n: int) -> str | None:
        return "negative" if bool((x < 0).any()) else None

    toy.serve("torch", 1, supports=supports)
    toy.serve("inductor", 2)
    compiled: Callable[..., Tensor] = torch.compile(ops.toy, backend=cudagraphs)
    x = torch.ones(2, 3)
    compiled(x)
    with torch_ops.trace() as seen:
        compiled(x)
        compiled(x)
    assert seen.records == []
    (lost,) = seen.uncounted
    assert (lost.op, lost.count) == ("toy", 2)
    assert "DataDependent" in lost.reason
    assert f"not counted: 2 calls of toy: {lost.reason}" in str(seen)


def test_replays_of_a_compiler_that_is_not_known_are_not_counted(toy: Toy) -> None:
    toy.serve("torch", 1)

    def replays_too(graph: Any, inputs: Any) -> Any:
        return cudagraphs(graph, inputs)

    compiled = torch.compile(lambda x: ops.toy(ops.toy(x)), backend=replays_too)
    x = torch.ones(2, 3)
    with torch_ops.trace() as seen:
        compiled(x)
        compiled(x)
    assert [(r.count, r.how) for r in seen.records] == [(2, "ran")]
    (lost,) = seen.uncounted
    assert (lost.op, lost.count) == ("toy", 2)
    assert "ran without calling it: its compiler has left it out, or replays it" in lost.reason


def test_pairs_that_are_fused_count_as_such() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        y = ops.rms_norm(x + x, WEIGHT)
        return ops.silu_and_mul(y), ops.rms_norm(ops.rms_norm(x) + 1)

    compiled = torch.compile(both, backend="eager", fullgraph=True)
    with torch_ops.trace() as seen:
        compiled(X)
        compiled(X)
    assert counts(seen) == {
        op_of("fused_add_rms_norm"): 2,
        op_of("silu_and_mul"): 2,
        op_of("rms_norm"): 4,
    }
    assert [(f.name, f.calls, f.count) for f in seen.fused] == [
        ("fused_add_rms_norm", ("add", "rms_norm"), 2)
    ]
    assert "fused: add + rms_norm into fused_add_rms_norm, 2 times" in str(seen)


def test_graphs_within_graphs() -> None:
    """What is run once counts; a branch that may not be taken doesn't; nor what nobody needs."""

    @torch.compiler.nested_compile_region
    def region(x: Tensor) -> Any:
        return ops.silu_and_mul(x)

    def whole(x: Tensor) -> Any:
        ops.gelu_and_mul(x)
        y = region(x) + region(x)
        taken = torch.cond(x.sum() > 0, ops.rms_norm, lambda z: z + 1, (y,))
        return torch.utils.checkpoint.checkpoint(ops.rms_norm, taken, use_reentrant=False)

    compiled = torch.compile(whole, backend="eager", fullgraph=True)
    with torch_ops.trace() as seen:
        compiled(X)
        compiled(X)
    assert counts(seen) == {op_of("silu_and_mul"): 4, op_of("rms_norm"): 2}
    (lost,) = seen.uncounted
    assert (lost.op, lost.count) == ("rms_norm", None)
    assert "in a branch or a loop" in lost.reason


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal calls of a graph with gradients may be merged: one of them, at least, is replayed."""
    set_inline(False)
    x = torch.randn(3, 8, requires_grad=True)

    def step(x: Tensor) -> Any:
        return (ops.silu_and_mul(x) + ops.silu_and_mul(x)).sum()

    merging = torch.compile(step, backend="aot_eager_decomp_partition", fullgraph=True)
    with torch_ops.trace() as seen:
        merging(x).backward()
    ran = op_of("silu_and_mul", source="call", how="ran")
    assert counts(seen) == {ran: 1, op_of("silu_and_mul_backward", source="forward", how="ran"): 1}
    (lost,) = seen.uncounted
    assert (lost.op, lost.count) == ("silu_and_mul", 1)
    monkeypatch.setattr(dynamo, "may_replay", lambda compiler: True)
    torch._dynamo.reset()
    replaying = torch.compile(step, backend=cudagraphs, fullgraph=True)
    replaying(x)
    with torch_ops.trace() as seen:
        replaying(x)
    assert counts(seen) == {op_of("silu_and_mul", source="call", how="replayed"): 1}
    merged, backward = seen.uncounted
    assert (merged.op, merged.count) == ("silu_and_mul", 1)
    assert "equals another call" in merged.reason
    assert (backward.op, backward.count) == (None, None)
    assert "in the backward of a compiled graph" in backward.reason


def test_frames_and_threads() -> None:
    """Each part of a function that a graph break divides, in each thread."""

    def divided(x: Tensor) -> Any:
        x = ops.rms_norm(x)
        torch._dynamo.graph_break()
        return ops.silu_and_mul(x)

    compiled = torch.compile(divided, backend="eager")
    compiled(X)
    with torch_ops.trace() as seen, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: compiled(X), range(40)))
    assert counts(seen) == {op_of("rms_norm"): 40, op_of("silu_and_mul"): 40}


def test_a_run_that_raises_is_not_counted() -> None:
    def fails(graph: Any, inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            raise ZeroDivisionError

        return call

    compiled = torch.compile(block, backend=fails)
    with torch_ops.trace() as seen:
        with pytest.raises(ZeroDivisionError):
            compiled(X)
        block(X)
    assert counts(seen) == {
        op_of("rms_norm", how="ran"): 2,
        op_of("silu_and_mul", how="ran"): 1,
    }


@pytest.mark.parametrize("traced", [False, True])
def test_forgotten_code_is_forgotten(traced: bool) -> None:
    before = set(counting._graphs)
    compiled = torch.compile(block, backend="eager")
    compiled(X)
    known = set(counting._graphs) - before
    (name,) = [graph._name for number, graph in counting._graphs.items() if number in known]
    if traced:
        with torch_ops.trace():
            compiled(X)
            torch._dynamo.reset()
    else:
        torch._dynamo.reset()
    gc.collect()
    assert known.isdisjoint(counting._graphs)
    assert name not in globals()


def test_a_pytorch_that_lacks_what_this_needs_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = SimpleNamespace(output=SimpleNamespace(compiler_fn=None, global_scope={}))
    monkeypatch.setattr(counting, "_lacking", None)
    with torch_ops.trace() as seen:
        pass
    assert not seen.uncounted
    with monkeypatch.context() as patch:
        patch.setattr(dynamo, "_current_tracer", lambda: tracer)
        counting.note_graphs()
    with torch_ops.trace() as seen:
        pass
    (lost,) = seen.uncounted
    assert (lost.op, lost.count) == (None, None)
    assert str(seen).splitlines()[-1] == f"not counted: calls of any op: {lost.reason}"
    assert re.match(
        "what compiled graphs inline or replay isn't known on this PyTorch: AttributeError: .*"
        "'install_global_unsafe'",
        lost.reason,
    )


def test_a_graph_captured_by_hand_counts_where_that_is_said(toy: Toy) -> None:
    toy.serve("torch", 1)
    with torch_ops.trace() as captured:
        toy()
        toy()
    with torch_ops.trace() as seen:
        toy()
        seen.replayed(captured, times=3)
        seen.replayed(captured)
    assert counts(seen) == {op_of("toy", how="ran"): 1, op_of("toy", how="replayed"): 8}
    with pytest.raises(ValueError, match="times must be at least 0, received -1"):
        seen.replayed(captured, -1)


def test_ranges_in_pytorchs_profiler(toy: Toy) -> None:
    toy.serve("torch", 1)
    compiled = torch.compile(lambda x: ops.silu_and_mul(ops.toy(x)), backend="eager")
    x = torch.ones(3, 8)
    compiled(x)
    with profile(activities=[ProfilerActivity.CPU]) as seen, torch_ops.trace():
        ops.rms_norm(X)
        compiled(x)
    names = {event.name for event in seen.events() if event.name.startswith("torch_ops::")}
    assert names >= {
        "torch_ops::rms_norm [torch]",
        "torch_ops::toy [torch]",
        "torch_ops::graph: toy [torch], silu_and_mul [torch, inlined]",
    }
