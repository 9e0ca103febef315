"""Backends by role and phase, in one declaration; all or none, and in compiled graphs."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import torch_ops
from torch_ops.attention import Attention, AttentionMetadata, attention_state
from torch_ops.attention.assignment import PhaseBackends, assign_attention_backends, role_of

from . import support

SPLIT = PhaseBackends("torch_flash", "torch_math")


@pytest.fixture
def model() -> nn.ModuleDict:
    """Self-attention, self-attention with a window, and cross-attention; one layer is pinned."""
    return nn.ModuleDict(
        {
            "first": Attention(4, 8, 2, is_causal=True),
            "near": Attention(4, 8, 2, is_causal=True, window_left=3),
            "memory": Attention(4, 8, 2, role="cross"),
            "fixed": Attention(4, 8, 2, required_backend="torch_math"),
        }
    )


def runs(layer: nn.Module, queries: int) -> str:
    """Which of PyTorch's kernels a call ran."""
    assert isinstance(layer, Attention)
    q, k, v = support.inputs(layer, queries=queries, keys=6)
    (kernel,) = support.sdpa(lambda: layer(q, k, v))
    return kernel.removeprefix(support.SDPA).removeprefix("_")


@pytest.mark.usefixtures("uncompiled_attention")
def test_roles_have_backends_of_their_own_by_phase(model: nn.ModuleDict) -> None:
    roles = [role_of(layer) for layer in support.layers(model)]
    assert roles == ["self", "window", "cross", "self"]
    token = assign_attention_backends(
        model,
        {"self": SPLIT, "window": "torch_math", "cross": PhaseBackends("inductor", "torch_flash")},
    )
    report = token.report
    assert (report.switched, report.pinned) == (("first", "near", "memory"), ("fixed",))
    assert runs(model["first"], 4).startswith("flash")
    assert model["first"].backend == "torch_flash"
    assert runs(model["first"], 1) == "attention_math"
    assert model["first"].backend == "torch_math"
    assert runs(model["near"], 4) == "attention_math"
    assert runs(model["memory"], 1).startswith("flash")
    assert "prefill torch_flash, decode torch_math" in repr(model["first"])
    token.undo()
    assert runs(model["first"], 1).startswith("flash")


def test_a_role_without_a_layer_is_an_error(model: nn.ModuleDict) -> None:
    state = attention_state(model)
    with pytest.raises(
        torch_ops.AttentionOverrideError,
        match=r"no layer has the role 'crosss' .*'cross', 'self', 'window'.*Nothing was changed",
    ):
        assign_attention_backends(model, {"self": "torch_math", "crosss": "torch_math"})
    assert attention_state(model) == state


@pytest.mark.parametrize(("by_role", "kind"), [({}, ValueError), ([("self", "triton")], TypeError)])
def test_what_names_no_role_is_an_error(
    by_role: Any, kind: type[Exception], model: nn.ModuleDict
) -> None:
    with pytest.raises(kind, match=r"argument 'by_role' is .*at least one role"):
        assign_attention_backends(model, by_role)


def test_one_refused_phase_of_one_role_moves_nothing(model: nn.ModuleDict) -> None:
    assign_attention_backends(model, {"window": "torch_math"})
    state = attention_state(model)
    with pytest.raises(torch_ops.AttentionOverrideError, match=r"near .*CUDA only") as error:
        assign_attention_backends(
            model, {"self": "torch_math", "window": PhaseBackends("torch_flash", "triton")}
        )
    assert set(error.value.refused) == {"near"}
    assert attention_state(model) == state
    with pytest.raises(ValueError, match="torch_flashh"):
        assign_attention_backends(model, {"self": PhaseBackends("torch_flashh", "torch_math")})
    assert attention_state(model) == state


def test_a_dry_run_and_undo_out_of_order(model: nn.ModuleDict) -> None:
    state = attention_state(model)
    report = assign_attention_backends(model, {"self": SPLIT}, dry_run=True).report
    assert report.switched == ("first",)
    assert attention_state(model) == state
    first = assign_attention_backends(model, {"self": SPLIT})
    second = assign_attention_backends(model, {"self": "torch_math", "cross": None})
    with pytest.raises(torch_ops.AttentionOverrideError, match="out of order"):
        first.undo()
    second.undo()
    first.undo()
    assert attention_state(model) == state


def test_copies_keep_their_phases(model: nn.ModuleDict) -> None:
    assign_attention_backends(model, {"self": SPLIT})
    copies: list[nn.ModuleDict] = [deepcopy(model), pickle.loads(pickle.dumps(model))]
    for copy in copies:
        assert attention_state(copy) == attention_state(model)
        assert runs(copy["first"], 1) == "attention_math"
        assign_attention_backends(copy, {"self": None})
        assert runs(model["first"], 1) == "attention_math"


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_layer_changes_its_backend_with_the_phase(model: nn.ModuleDict) -> None:
    layer = model["first"]
    assert isinstance(layer, Attention)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for target in (SPLIT, PhaseBackends("torch_math", "torch_flash"), SPLIT, None):
        assign_attention_backends(model, {"self": target})
        for queries in (5, 1, 4):
            args = support.inputs(layer, queries=queries, keys=7)
            with torch_ops.trace() as seen:
                out = compiled(*args)
            expected = target or PhaseBackends("torch_flash", "torch_flash")
            wanted = expected.decode if queries == 1 else expected.prefill
            assert [record.backend for record in seen.records] == [wanted]
            assert support.worst(out, layer.spec, *args) <= 1
    assert counter.frame_count <= 2, "one query is a graph of its own in PyTorch"


def test_paged_calls_have_phases_too() -> None:
    layer = Attention(4, 8, 2, is_causal=True)
    q, (k, v) = torch.randn(3, 4, 8), torch.randn(2, 2, 4, 2, 8)
    decode = AttentionMetadata.paged(
        [1, 1], [2, 3], [[0], [1]], page_size=4, num_pages=2, device="cpu"
    )
    prefill = AttentionMetadata.paged(
        [1, 2], [2, 3], [[0], [1]], page_size=4, num_pages=2, device="cpu"
    )
    layer(q, k, v, prefill)
    with pytest.raises(torch_ops.AttentionOverrideError, match="ragged and paged calls"):
        assign_attention_backends(layer, {"self": PhaseBackends("torch_math", "torch_flash")})
    assign_attention_backends(layer, {"self": PhaseBackends("torch_math", "torch_math")})
    layer(q[:2], k, v, decode)
    assert layer.backend == "torch_math"
