"""FlashInfer's backend without FlashInfer: what it takes, and what it hands over."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from typing import Any

import pytest
import torch

import torch_ops
from torch_ops import CaptureError, once
from torch_ops.attention import AttentionBackend
from torch_ops.declarations import catalogue
from torch_ops.once import KernelLoadError

from . import examples
from .arguments import BRAIN, HALF, dense, off, rope_args, spec, t
from .model_flashinfer import Model
from .test_platforms import SERVED

FA2, FA3 = AttentionBackend.FLASHINFER_FA2, AttentionBackend.FLASHINFER_FA3
CPU = torch.device("cpu")
_prefill = examples.part("flashinfer", "_prefill")
_ragged = examples.part("flashinfer", "_ragged")


def run(op: str, *args: Any) -> Any:
    return examples.loaded(op, "flashinfer").function(*args)


@pytest.mark.parametrize("op", SERVED["flashinfer"])
def test_signatures_without_the_package(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    kernel = examples.loaded(op, "flashinfer")
    declared = inspect.signature(catalogue()[op].reference)
    found = inspect.signature(kernel.function)
    assert [(p.name, p.default) for p in found.parameters.values()] == [
        (p.name, p.default) for p in declared.parameters.values()
    ]
    assert kernel.supports is not None


def test_norms_are_handed_over(flashinfer: Model) -> None:
    x, weight = torch.randn(2, 3, 64).half(), torch.randn(64).half()
    run("rms_norm", x, weight, 0.5)
    run("gemma_rms_norm", x, weight)
    run("layer_norm", x.bfloat16(), weight.float(), weight.float(), 0.25)
    assert flashinfer.called == [
        ("rmsnorm", 0.5, False), ("gemma_rmsnorm", 1e-6, False), ("layernorm", 0.25),
    ]  # fmt: skip
    assert flashinfer.built == ["norm"]


def test_rope_is_handed_over(flashinfer: Model) -> None:
    for neox in (True, False):
        q, k, cache, positions, _ = rope_args(neox=neox)
        run("apply_rope", q, k, cache, positions, neox)
        run("apply_rope_", q, k, cache, positions, neox)
    assert flashinfer.called == [("rope", False)] * 2 + [("rope", True)] * 2


def test_nothing_is_loaded_for_nothing(flashinfer: Model) -> None:
    w = t(64)
    run("rms_norm", t(0, 64), w)
    run("layer_norm", t(0, 64, dtype=BRAIN), torch.empty(64), torch.empty(64))
    run("silu_and_mul", t(0, 64))
    run("gelu_and_mul", t(3, 0))
    run("fused_add_rms_norm_", t(0, 64), t(0, 64), w)
    run("apply_rope", *rope_args(tokens=0))
    run("merge_state", t(0, 2, 64), torch.empty(0, 2), t(0, 2, 64), torch.empty(0, 2))
    for empty in (dense(queries=0), dense(keys=0), dense(batch=0), dense(heads=0, kv_heads=0)):
        run("attention_with_lse", *empty)
    assert not flashinfer.built
    assert not flashinfer.called


def test_the_family_is_pinned_and_prepared(flashinfer: Model) -> None:
    module = examples.part("flashinfer", "attention")
    for member, family in ((FA2, "fa2"), (FA3, "fa3")):
        flashinfer.called.clear()
        flashinfer.built.clear()
        prepared = module.prepare(spec(window=3), CPU, HALF, member)
        assert prepared.backend is member
        prepared.run(*dense())
        prepared.run(*dense(batch=2))
        assert flashinfer.built == [f"single {family} 64 True", f"batch {family} 64 True"]
        assert [call[:2] for call in flashinfer.called] == [
            ("single", family), ("plan", family), ("run", family),
        ]  # fmt: skip


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("keys", "head_dim"), [(7, 64), (128, 64), (128, 128), (192, 128)])
def test_fa3_multiplies_no_value_of_the_next_sequence(
    keys: int, head_dim: int, is_causal: bool, flashinfer: Model
) -> None:
    """By zero, of which NaN makes NaN: packed where tiles end with sequences, else in pages."""
    prepared = examples.part("flashinfer", "attention").prepare(
        dataclasses.replace(spec(head_dim), is_causal=is_causal), CPU, HALF, FA3
    )
    q, k, v = dense(batch=2, keys=keys, head_dim=head_dim)
    wanted = prepared.run(q, k, v)
    k[1] = v[1] = math.nan
    assert torch.equal(prepared.run(q, k, v)[0], wanted[0])
    (plan,) = _ragged._plans
    assert plan.pages == (keys % (192 if head_dim == 128 and not is_causal else 128) > 0)


def test_fa3_reads_keys_and_values_in_pages_that_lie_alike(
    flashinfer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = dense(batch=2)
    pair = torch.stack([v, v], 3)[:, :, :, 0]
    monkeypatch.setattr(_prefill, "family", lambda device: "fa3")
    assert examples.refusal("attention", "flashinfer", q, k, v) is None
    assert examples.refusal("attention", "flashinfer", q, k, pair) == (
        "v strides (1792, 256, 128, 1) for shape [2, 7, 2, 64] (supported: (896, 128, 64, 1), "
        "those of k)"
    )
    prepared = examples.part("flashinfer", "attention").prepare(spec(), CPU, HALF, FA3)
    assert torch.equal(prepared.run(q, k, pair), prepared.run(q, k, v))


def test_layers_copy_what_does_not_lie_right(flashinfer: Model) -> None:
    module = examples.part("flashinfer", "attention")
    prepared = module.prepare(spec(), CPU, HALF, FA2)
    q, k, v = dense(batch=2)
    wanted = prepared.run(q, k, v)
    apart = [torch.cat([x, x], 1)[:, : x.shape[1]] for x in (q, k, v)]
    turned = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    shifted = [off(x).copy_(x) for x in (q, k, v)]
    for views in (apart, turned, shifted):
        assert any(_prefill.layout("x", x) for x in views)
        assert torch.equal(prepared.run(*views), wanted)


def test_arguments_of_single_sequences(flashinfer: Model) -> None:
    run("attention", *dense(head_dim=128), False, None, 1000)
    run("attention_with_lse", *dense(), True, 0.5)
    assert flashinfer.called == [
        ("single", "fa2", False, 128**-0.5, 7, False), ("single", "fa2", True, 0.5, -1, True),
    ]  # fmt: skip
    assert flashinfer.built == ["single fa2 128 True", "single fa2 64 False"]


def test_queries_before_the_first_key(flashinfer: Model) -> None:
    q, k, v = dense(queries=9, keys=4)
    out, lse = run("attention_with_lse", q, k, v, True)
    assert not out[:, :5].any()
    assert (lse[:, :5] == -math.inf).all()
    assert lse[:, 5:].isfinite().all()
    assert len(flashinfer.called) == 1


def test_plans_are_kept_by_shape(flashinfer: Model) -> None:
    for _ in range(3):
        run("attention", *dense(batch=2), True)
        run("attention_with_lse", *dense(batch=2), True)
    plans = [call for call in flashinfer.called if call[0] == "plan"]
    assert plans == [("plan", "fa2", [0, 5, 10], [0, 7, 14], 4, 2, 64)]
    run("attention", *dense(batch=2), False)
    run("attention", *dense(batch=2), True, 0.5)
    run("attention", *dense(batch=2), True, None, 2)
    run("attention", *dense(batch=2, keys=8), True)
    assert len([call for call in flashinfer.called if call[0] == "plan"]) == 5


def test_old_plans_are_dropped_but_captured_ones(
    flashinfer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("attention", *dense(batch=2))
    (kept,) = _ragged._plans
    monkeypatch.setattr(_ragged, "capturing", lambda: True)
    run("attention", *dense(batch=2))
    monkeypatch.setattr(_ragged, "capturing", lambda: False)
    for keys in range(8, 8 + _ragged.PLANS + 3):
        run("attention", *dense(batch=2, keys=keys))
    assert len(_ragged._plans) == _ragged.PLANS
    assert kept in _ragged._plans
    assert 8 not in [shape.keys for shape in _ragged._plans]


def test_captures_plan_and_load_nothing(flashinfer: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    run("attention", *dense(batch=2))
    monkeypatch.setattr(_ragged, "capturing", lambda: True)
    monkeypatch.setattr(once, "capturing", lambda: True)
    with pytest.raises(CaptureError, match=r"isn't planned for Shape.*run this shape once"):
        run("attention", *dense(batch=3))
    with pytest.raises(CaptureError, match="FlashInfer's norms isn't loaded"):
        run("rms_norm", t(3, 64), t(64))
    run("attention", *dense(batch=2))


@pytest.mark.parametrize(
    ("op", "args", "module", "what"),
    [
        ("rms_norm", (t(3, 64), t(64)), "norm", "FlashInfer's norms"),
        ("silu_and_mul", (t(3, 64),), "silu_and_mul", "FlashInfer's silu_and_mul"),
        ("apply_rope", rope_args(), "rope", "FlashInfer's rotary embedding"),
        (
            "attention", dense(), "single fa2 64 False",
            "FlashInfer's prefill fa2 for torch.float16, head_dim 64",
        ),
        (
            "attention", (*dense(batch=2), False, None, 3), "batch fa2 64 True",
            "FlashInfer's batched prefill fa2 for torch.float16, head_dim 64, windowed",
        ),
    ],
)  # fmt: skip
def test_what_does_not_compile_is_kept_and_told(
    flashinfer: Model, op: str, args: tuple[Any, ...], module: str, what: str
) -> None:
    flashinfer.broken[module] = RuntimeError("Could not find nvcc")
    for _ in range(2):
        with pytest.raises(KernelLoadError) as raised:
            run(op, *args)
        assert str(raised.value) == f"{what}: RuntimeError: Could not find nvcc"
    assert flashinfer.built.count(module) == 1
    assert flashinfer.called == []
    flashinfer.broken.clear()
    torch_ops.refresh()
    run(op, *args)
    assert flashinfer.built.count(module) == 2


def test_a_package_that_cannot_be_imported(
    forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(KernelLoadError, match="FlashInfer's norms: ModuleNotFoundError: "):
        run("rms_norm", t(3, 64), t(64))
