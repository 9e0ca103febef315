"""Layers in CUDA graphs: paged steps and swaps are right, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import torch_ops
from tests.attention import support
from torch_ops.attention import Attention, AttentionMetadata, override_attention_backend
from torch_ops.attention.assignment import PhaseBackends, assign_attention_backends
from torch_ops.attention.cache import Cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # FlashInfer may compile
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]

HEADS, KV_HEADS, HEAD_DIM, PAGE, BATCH, LAYERS = 8, 2, 128, 16, 4, 3
POOL = 64
STEPS = ([5, 16, 33, 70], [6, 17, 34, 71], [100, 1, 48, 16], [7, 18, 35])
BACKENDS = ("triton", "torch_math", "flashinfer_fa2")


class Steps(nn.Module):
    """Layers on a cache of their own each; all outputs are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Attention(HEADS, HEAD_DIM, KV_HEADS, is_causal=True, scale=0.05 * (index + 1))
            for index in range(LAYERS)
        )

    def forward(self, q: Tensor, caches: Tensor, metadata: AttentionMetadata) -> Tensor:
        outputs = [
            layer(q, caches[index, 0], caches[index, 1], metadata)
            for index, layer in enumerate(self.layers)
        ]
        return torch.stack(outputs)


@pytest.fixture
def model() -> Steps:
    torch.manual_seed(0)
    return Steps().to("cuda", torch.bfloat16)


@pytest.fixture
def tensors() -> tuple[Tensor, Tensor]:
    q = torch.randn(BATCH, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    shape = (LAYERS, 2, POOL, PAGE, KV_HEADS, HEAD_DIM)
    return q, torch.randn(shape, device="cuda", dtype=torch.bfloat16)


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What layers ran, noted by their kernels' bodies: nothing where a graph is replayed."""
    ran: list[str] = []
    run = Cache.run_planned

    def noted(self: Cache, override: Any, *args: Any) -> Tensor:
        ran.append(str(override))
        return run(self, override, *args)

    monkeypatch.setattr(Cache, "run_planned", noted)
    return ran


def pages_of(kv_lens: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(kv_lens))
    free = iter(torch.randperm(POOL, generator=generator).tolist())
    return [[next(free) for _ in range(-(-length // PAGE))] for length in kv_lens]


def planned() -> AttentionMetadata:
    return AttentionMetadata.paged(
        [1] * BATCH,
        STEPS[0],
        pages_of(STEPS[0]),
        page_size=PAGE,
        num_pages=POOL,
        device="cuda",
        max_kv_len=POOL * PAGE,
        max_pages=POOL,
    )


def judge(model: Steps, out: Tensor, q: Tensor, caches: Tensor, kv_lens: list[int]) -> None:
    """Compare with dense attention in float64, sequence by sequence."""
    pages = pages_of(kv_lens)
    for index, layer in enumerate(support.layers(model)):
        for row, (length, own) in enumerate(zip(kv_lens, pages, strict=True)):
            k, v = (cache[own].flatten(0, 1)[:length] for cache in caches[index])
            args = (q[row].view(1, 1, HEADS, HEAD_DIM), k[None], v[None])
            mine = out[index, row].view(1, 1, HEADS, HEAD_DIM)
            assert support.worst(mine, layer.spec, *args) <= 1, (index, row, length)


def usable(name: str) -> None:
    if name.startswith("flashinfer"):
        pytest.importorskip("flashinfer", reason="flashinfer isn't installed")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_step_follows_its_metadata(
    backend: str, model: Steps, tensors: tuple[Tensor, Tensor], bodies: list[str]
) -> None:
    usable(backend)
    q, caches = tensors
    metadata = planned()
    with torch.no_grad(), torch_ops.use_backend("torch"):
        model(q, caches, metadata)  # tells the layers that they serve paged calls
    override_attention_backend(model, backend)
    with torch.no_grad():
        model(q, caches, metadata)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(q, caches, metadata)
    bodies.clear()
    for kv_lens in STEPS:
        metadata.plan([1] * len(kv_lens), kv_lens, pages_of(kv_lens))
        out.fill_(torch.nan)
        graph.replay()
        judge(model, out, q, caches, kv_lens)
        if len(kv_lens) < BATCH:
            assert out[:, len(kv_lens) :].eq(0).all()
    assert not bodies


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # PyTorch's own trees
def test_swaps_between_steps_under_reduce_overhead(
    model: Steps, tensors: tuple[Tensor, Tensor], bodies: list[str]
) -> None:
    """Values are right after each of twenty changes, and all but the first ones are replayed."""
    q, caches = tensors
    metadata = planned()
    torch._dynamo.reset()
    counters.clear()
    compiled: Callable[..., Tensor] = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    targets: list[Any] = ["triton", "torch_math"]
    with torch.no_grad():
        compiled(q, caches, metadata)
        for turn in range(24):
            if turn == 12:  # by then every state has been recorded
                assert set(bodies) >= {"triton", "torch_math"}
                bodies.clear()
            if turn % 4 == 3:
                layer = support.layers(model)[1]
                torch_ops.attention.apply_attention_backend_override(layer, targets[turn % 2])
            else:
                override_attention_backend(model, targets[turn % 2])
            for _ in range(3):
                kv_lens = STEPS[turn % 3]
                metadata.plan([1] * BATCH, kv_lens, pages_of(kv_lens))
                out = compiled(q, caches, metadata).clone()
                judge(model, out, q, caches, kv_lens)
    assert not bodies, "going back to what was recorded runs no kernel's body"
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # PyTorch's own trees
def test_swaps_between_steps_of_layers_compiled_apart(
    model: Steps,
    tensors: tuple[Tensor, Tensor],
    bodies: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They replay likewise, and their frames ask no tensor for a size."""
    q, caches = tensors
    metadata = planned()
    torch._dynamo.reset()
    counters.clear()
    apart: list[Callable[..., Tensor]] = [
        torch.compile(layer, mode="reduce-overhead", fullgraph=True)
        for layer in support.layers(model)
    ]
    monkeypatch.delattr(torch._dynamo.utils, "call_size")
    targets = ("triton", "torch_math")
    with torch.no_grad():
        for turn in range(8):
            override_attention_backend(model, targets[turn % 2])
            if turn == 4:  # by then both have been recorded
                assert set(bodies) == set(targets)
                bodies.clear()
            for _ in range(3):
                kv_lens = STEPS[turn % 3]
                metadata.plan([1] * BATCH, kv_lens, pages_of(kv_lens))
                torch.compiler.cudagraph_mark_step_begin()
                outputs = [
                    call(q, caches[index, 0], caches[index, 1], metadata)
                    for index, call in enumerate(apart)
                ]
                judge(model, torch.stack(outputs), q, caches, kv_lens)
    assert not bodies, "going back to what was recorded runs no kernel's body"
    assert counters["stats"]["unique_graphs"] <= 2


def test_phases_have_backends_of_their_own(model: Steps, tensors: tuple[Tensor, Tensor]) -> None:
    q, caches = tensors
    decode, prefill = (
        planned(),
        AttentionMetadata.paged(
            [2, 2],
            [20, 3],
            [[3, 9], [5]],
            page_size=PAGE,
            num_pages=POOL,
            device="cuda",
        ),
    )
    with torch.no_grad():
        with torch_ops.use_backend("torch"):
            model(q, caches, prefill)
        assign_attention_backends(model, {"self": PhaseBackends("torch_math", "triton")})
        for metadata, wanted in ((decode, "triton"), (prefill, "torch_math"), (decode, "triton")):
            with torch_ops.trace() as seen:
                model(q, caches, metadata)
            assert {record.backend.value for record in seen.records} == {wanted}
