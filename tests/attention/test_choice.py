"""Who decides what a layer runs, from the override down to the declared order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import torch_ops
from torch_ops import Backend, policy
from torch_ops.attention import Attention, AttentionBackend, override_attention_backend

from . import support

UNAVAILABLE = torch_ops.BackendUnavailableError


Tune = Callable[[Backend], None]


@pytest.fixture
def tune() -> Iterator[Tune]:
    """Put a backend of attention into the tuned table of the CPU until the test ends."""
    before = dict(policy.tuned)

    def tuner(backend: Backend) -> None:
        policy.tuned["cpu", None, "attention"] = backend
        policy.invalidate()

    yield tuner
    policy.tuned.clear()
    policy.tuned.update(before)
    policy.invalidate()


def ran(layer: Attention) -> tuple[str, str]:
    """Which family a call runs, and who chose it."""
    with torch_ops.trace() as trace:
        layer(*support.inputs(layer))
    (record,) = trace.records
    return record.backend.value, record.source


@pytest.mark.usefixtures("script")
def test_every_source_beats_those_below_it(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, built = Attention(4, 8), Attention(4, 8, backend="torch_math")
    assert ran(plain) == ("torch_flash", "declared")
    tune(Backend("scripted"))
    assert ran(plain) == ("scripted_one", "tuned")
    assert ran(built) == ("torch_math", "layer")
    monkeypatch.setenv("TORCH_OPS_BACKEND", "scripted")
    torch_ops.refresh()
    assert ran(built) == ("scripted_one", "environment")
    undo = torch_ops.set_backend(attention="torch")
    assert ran(plain) == ("torch_flash", "process")
    assert ran(built) == ("torch_math", "process"), "its default is of that backend"
    with torch_ops.use_backend(attention="scripted"):
        assert ran(built) == ("scripted_one", "scope")
        override_attention_backend(built, "scripted_three")
        assert ran(built) == ("scripted_three", "layer")
        with torch_ops.use_backend("torch"):
            assert ran(built) == ("scripted_three", "layer")
    undo()


def test_a_tuned_backend_that_cannot_run_is_skipped(tune: Tune) -> None:
    tune(Backend.AITER)
    assert ran(Attention(4, 8)) == ("torch_flash", "declared")
    tune(Backend.TORCH)
    assert ran(Attention(4, 8)) == ("torch_flash", "tuned")
    layer = Attention(6, 16, 2, is_causal=True, window_left=3, logits_soft_cap=5.0)
    assert layer.backend is AttentionBackend.INDUCTOR


@pytest.mark.parametrize("source", ["scope", "process", "environment"])
def test_explicit_choices_are_strict(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Attention(4, 8, logits_soft_cap=5.0)
    text = rf"backend 'torch_flash', 'torch_cudnn', 'torch_math', chosen by {source}, can't serve"
    if source == "environment":
        monkeypatch.setenv("TORCH_OPS_BACKEND", "attention=torch")
        torch_ops.refresh()
    undo = torch_ops.set_backend("torch") if source == "process" else lambda: None
    scope = {"attention": "torch"} if source == "scope" else {}
    with torch_ops.use_backend(**scope), pytest.raises(UNAVAILABLE, match=text) as error:
        layer(*support.inputs(layer))
    undo()
    assert error.value.reasons.count("logits_soft_cap 5.0 (supported: 0.0)") == 3
    assert "AttentionSpec(num_heads=4" in str(error.value)


def test_a_construction_default_is_strict() -> None:
    layer = Attention(4, 8, backend="torch_cudnn")
    with pytest.raises(UNAVAILABLE, match="'torch_cudnn', chosen by layer, can't serve"):
        layer(*support.inputs(layer))


def test_a_scope_for_another_op_is_not_an_error() -> None:
    layer = Attention(4, 8)
    with torch_ops.use_backend(rms_norm="torch", attention_with_lse="inductor"):
        assert ran(layer) == ("torch_flash", "declared")


def test_a_scope_with_families_is_refused_with_the_known_backends() -> None:
    with pytest.raises(ValueError, match="'torch_math' is not a Backend"):
        torch_ops.use_backend(attention="torch_math")


def test_a_layer_takes_no_family_that_it_does_not_support() -> None:
    layer = Attention(4, 8, supported_backends=["torch_math"])
    assert ran(layer) == ("torch_math", "declared")
    with torch_ops.use_backend("torch"):
        assert ran(layer) == ("torch_math", "scope")
    text = r"not among the layer's supported_backends \('torch_math'\)"
    with torch_ops.use_backend("inductor"), pytest.raises(UNAVAILABLE, match=text):
        layer(*support.inputs(layer))


def test_members_name_their_order_on_every_platform() -> None:
    from torch_ops.attention.choice import ORDER

    assert set(ORDER) == {"cpu", "cuda", "rocm"}
    for names in ORDER.values():
        assert all(AttentionBackend(name) in AttentionBackend for name in names)
        assert len(names) == len(set(names))
    assert not {"flashinfer_fa2", "flashinfer_fa3", "torch_cudnn"} & set(ORDER["rocm"])
