"""Layers in a trace whose kernels don't run in Python: named as they were when they did."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_ops
from tests.replays import cudagraphs
from torch_ops import dynamo
from torch_ops.attention import (
    Attention,
    AttentionMetadata,
    group,
    override_attention_backend,
)

from . import support

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
HEADS, HEAD_DIM, PAGE, POOL = 2, 8, 4, 8


class Paged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Attention(HEADS, HEAD_DIM, is_causal=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> Tensor:
        out: Tensor = self.layer(q, k, v, metadata)
        return out


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A compiler whose graphs run once for each set of sizes, like CUDA graphs."""
    monkeypatch.setattr(dynamo, "may_replay", lambda compiler: True)
    # Layers of other tests that are gone may have left their overrides where these ones begin.
    monkeypatch.setattr(group.default_group, "route", group.Group().route)
    return cudagraphs


def told(call: Callable[[], object]) -> list[tuple[str, str, str, int, str]]:
    with torch_ops.trace() as seen:
        call()
    assert not seen.uncounted
    return [(r.op, r.backend.value, r.source, r.count, r.how) for r in seen.records]


@torch.no_grad()
def test_swaps_of_layers(replaying: Callable[..., Any]) -> None:
    model = support.stack(2)
    inputs = support.inputs(support.layers(model)[0])
    compiled = torch.compile(model, backend=replaying, fullgraph=True)

    def call() -> object:
        return compiled(*inputs)

    call()
    assert told(call) == [("attention", "torch_flash", "declared", 2, "replayed")]
    for how in ("ran", "replayed"):
        override_attention_backend(model, "torch_math")
        assert told(call) == [("attention", "torch_math", "layer", 2, how)]
        assert told(call) == [("attention", "torch_math", "layer", 2, "replayed")]
        override_attention_backend(model, None)
        assert told(call) == [("attention", "torch_flash", "declared", 2, "replayed")]


@torch.no_grad()
def test_steps_of_paged_layers(replaying: Callable[..., Any]) -> None:
    """Where dense calls would go elsewhere."""
    model = Paged()
    caches = torch.randn(2, POOL, PAGE, HEADS, HEAD_DIM)
    compiled = torch.compile(model, backend=replaying, fullgraph=True)
    for query_lens in ([1, 1], [2, 3]):
        metadata = AttentionMetadata.paged(
            query_lens, [3, 6], [[3], [5, 1]], page_size=PAGE, num_pages=POOL, device="cpu"
        )
        call = functools.partial(
            compiled, torch.randn(sum(query_lens), HEADS, HEAD_DIM), *caches, metadata
        )
        override_attention_backend(model, None)
        assert told(call) == [("attention", "torch_math", "declared", 1, "ran")]
        assert told(call) == [("attention", "torch_math", "declared", 1, "replayed")]
        override_attention_backend(model, "torch_math")
        assert told(call) == [("attention", "torch_math", "layer", 1, "ran")]
        assert told(call) == [("attention", "torch_math", "layer", 1, "replayed")]
