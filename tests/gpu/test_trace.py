"""Traces of CUDA graphs: PyTorch's own are counted, those captured by hand where that is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torch_ops
from torch_ops import Trace, ops
from torch_ops.attention import Attention, override_attention_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),  # PyTorch's own trees
    pytest.mark.usefixtures("fresh_dynamo", "opaque"),
]
RUNS = 5


def block(x: Tensor) -> Tensor:
    out: Tensor = ops.silu_and_mul(ops.rms_norm(ops.rms_norm(x) * 2) + 1)
    return out


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(4, 64, 2, scale=0.1 * (i + 1)) for i in range(2))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([layer(q, k, v) for layer in self.layers])


def ways(seen: Trace, *how: str) -> Counter[tuple[object, ...]]:
    """Calls of some kinds, by all that is known of them but the kind."""
    found = Counter[tuple[object, ...]]()
    for r in seen.records:
        if r.how in how:
            found[r.op, r.backend, r.source, r.skipped] += r.count
    return found


def times(calls: Counter[tuple[object, ...]], runs: int) -> Counter[tuple[object, ...]]:
    return Counter({way: runs * count for way, count in calls.items()})


@torch.no_grad()
def run(compiled: Callable[..., Tensor], *args: Tensor) -> Trace:
    with torch_ops.trace() as seen:
        for _ in range(RUNS):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(*args)
    return seen


def eager(function: Callable[..., Tensor], *args: Tensor) -> Counter[tuple[object, ...]]:
    with torch.no_grad(), torch_ops.trace() as seen:
        function(*args)
    return ways(seen, "ran")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replays_are_named_as_eager_calls_are(dtype: torch.dtype) -> None:
    x = torch.randn(8, 256, device="cuda", dtype=dtype)
    compiled = torch.compile(block, mode="reduce-overhead", fullgraph=True)
    first, later = run(compiled, x), run(compiled, x)
    assert ways(first, "ran"), "it is warmed up and recorded"
    expected = times(eager(block, x), RUNS)
    assert ways(first, "ran", "replayed") == ways(later, "replayed") == expected
    assert not later.uncounted
    assert "replayed" in str(later)


def test_graphs_that_were_recorded_before_the_trace_follow_choices() -> None:
    x = torch.randn(8, 256, device="cuda")
    compiled = torch.compile(block, mode="reduce-overhead", fullgraph=True)
    for backend in ("torch", "triton", "torch", "triton"):
        with torch_ops.use_backend(backend):
            run(compiled, x)
            seen = run(compiled, x)
            assert ways(seen, "replayed") == times(eager(block, x), RUNS)
            assert {r.backend.value for r in seen.records} == {backend}


def test_layers_follow_swaps() -> None:
    model = Layers().to("cuda", torch.bfloat16)
    args = [torch.randn(1, 16, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2)]
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for backend in ("triton", "torch_math", "triton", "torch_math"):
        override_attention_backend(model, backend)
        run(compiled, *args)
        seen = run(compiled, *args)
        assert [(r.op, r.backend.value, r.source, r.count, r.how) for r in seen.records] == [
            ("attention", backend, "layer", 2 * RUNS, "replayed")
        ]


def test_a_graph_captured_by_hand() -> None:
    x = torch.randn(8, 256, device="cuda")
    expected = eager(block, x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch_ops.trace() as captured:
        block(x)  # plans of the trace's own
    with torch.no_grad(), torch_ops.trace() as captured, torch.cuda.graph(graph):
        block(x)
    assert ways(captured, "ran") == expected
    with torch_ops.trace() as seen:
        graph.replay()
        assert not seen.records
        seen.replayed(captured)
    assert ways(seen, "replayed") == expected
