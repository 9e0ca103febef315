"""Overrides: which layers, all or none, what is reported, and how they are taken back."""

from __future__ import annotations

import gc
import importlib
import re
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import torch_ops
from torch_ops import once
from torch_ops.attention import (
    Attention,
    AttentionBackend,
    apply_attention_backend_override,
    attention_state,
    override_attention_backend,
    prepare_attention_backend_override,
)

from . import support

REFUSED = torch_ops.AttentionOverrideError


@pytest.fixture
def model() -> nn.Module:
    """Two blocks with self- and cross-attention, of which one layer is nested deeper."""

    def block() -> nn.Module:
        cross = nn.Sequential(Attention(4, 8, role="cross"))
        return nn.ModuleDict({"self": Attention(4, 8, 2, is_causal=True), "cross": cross})

    return nn.ModuleDict({"blocks": nn.ModuleList([block(), block()]), "head": nn.Linear(2, 2)})


NAMES = ("blocks.0.self", "blocks.0.cross.0", "blocks.1.self", "blocks.1.cross.0")


def run(model: nn.Module) -> list[str]:
    """Call every layer and say what ran."""
    with torch_ops.trace() as trace:
        for layer in model.modules():
            if isinstance(layer, Attention):
                layer(*support.inputs(layer))
    return [record.backend.value for record in trace.records for _ in range(record.count)]


@pytest.mark.parametrize("target", ["torch_math", AttentionBackend.TORCH_MATH])
def test_all_layers_switch(model: nn.Module, target: str | AttentionBackend) -> None:
    assert support.backends(model) == run(model) == ["torch_flash"] * 4
    token = override_attention_backend(model, target)
    assert token.report.switched == NAMES
    assert token.report.unchanged == token.report.pinned == ()
    assert support.backends(model) == run(model) == ["torch_math"] * 4


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("*", NAMES),
        ("*.self", ("blocks.0.self", "blocks.1.self")),
        ("blocks.1.*", ("blocks.1.self", "blocks.1.cross.0")),
        ("blocks.[0].*", ("blocks.0.self", "blocks.0.cross.0")),
        ("blocks.0.cross.0", ("blocks.0.cross.0",)),
        (lambda name, layer: layer.role == "cross", ("blocks.0.cross.0", "blocks.1.cross.0")),
        (lambda name, layer: name.startswith("blocks.1"), ("blocks.1.self", "blocks.1.cross.0")),
        (lambda name, layer: layer.spec.is_causal, ("blocks.0.self", "blocks.1.self")),
    ],
)
def test_where_selects(
    model: nn.Module, where: str | Callable[[str, Attention], bool], names: tuple[str, ...]
) -> None:
    token = override_attention_backend(model, "torch_math", where=where)
    assert token.report.switched == names
    expected = {name: "torch_math" if name in names else "torch_flash" for name in NAMES}
    assert support.backends(model) == list(expected.values())


@pytest.mark.parametrize(
    "where", ["*.nothing", "BLOCKS.*", "", lambda name, layer: layer.role == "encoder"]
)
def test_selecting_no_layer_is_refused(
    model: nn.Module, where: str | Callable[[str, Attention], bool]
) -> None:
    before = attention_state(model)
    with pytest.raises(REFUSED, match=r"0 of 4 layers changed.*allow_noop=True") as error:
        override_attention_backend(model, "torch_math", where=where)
    assert error.value.refused == {}
    assert (f"a glob over the names {NAMES[0]!r}, " in str(error.value)) == isinstance(where, str)
    token = override_attention_backend(model, "torch_math", where=where, allow_noop=True)
    assert token.report.switched == token.report.unchanged == ()
    token.undo()
    assert attention_state(model) == before


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(REFUSED, match="0 of 0 layers changed"):
        override_attention_backend(nn.Linear(2, 2), "torch_math")
    override_attention_backend(nn.Linear(2, 2), "torch_math", allow_noop=True).undo()


def test_errors_of_a_predicate_come_through(model: nn.Module) -> None:
    before = attention_state(model)

    def where(name: str, layer: Attention) -> bool:
        raise LookupError(name)

    with pytest.raises(LookupError, match=r"blocks\.0\.self"):
        override_attention_backend(model, "torch_math", where=where)
    assert attention_state(model) == before


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda model: override_attention_backend("model", "torch_math"),  # type: ignore[arg-type]
            TypeError,
            "argument 'model' is a str (accepted: torch.nn.Module)",
        ),
        (
            lambda model: override_attention_backend(model, "torch_math", where=["*"]),  # type: ignore[arg-type]
            TypeError,
            "argument 'where' is a list (accepted: None, a glob over qualified names, or a "
            "predicate of name and layer)",
        ),
        (
            lambda model: override_attention_backend(model, "torch_mth"),
            ValueError,
            "'torch_mth' is not an AttentionBackend",
        ),
        (
            lambda model: apply_attention_backend_override(model, "torch_math"),
            TypeError,
            "argument 'layer' is a ModuleDict (accepted: torch_ops.attention.Attention)",
        ),
        (
            lambda model: prepare_attention_backend_override(model, "torch_math"),
            TypeError,
            "argument 'layer' is a ModuleDict (accepted: torch_ops.attention.Attention)",
        ),
        (
            lambda model: prepare_attention_backend_override(Attention(1, 8), "nope"),
            ValueError,
            "'nope' is not an AttentionBackend",
        ),
        (
            lambda model: prepare_attention_backend_override(Attention(1, 8), None),  # type: ignore[arg-type]
            ValueError,
            "None is not an AttentionBackend",
        ),
    ],
)
def test_arguments_are_checked(
    model: nn.Module, call: Callable[[Any], object], error: type[Exception], text: str
) -> None:
    before = attention_state(model)
    with pytest.raises(error, match=re.escape(text)):
        call(model)
    assert attention_state(model) == before


def test_a_layer_is_a_model() -> None:
    layer = Attention(4, 8)
    token = override_attention_backend(layer, "torch_math")
    assert token.report.switched == ("",)
    assert layer.backend is AttentionBackend.TORCH_MATH


def test_compiled_modules_are_seen_through(model: Any) -> None:
    blocks = model["blocks"]
    inner = blocks[0]["self"]
    blocks[0]["self"] = torch.compile(inner, backend="eager")
    compiled: Any = torch.compile(model, backend="eager")
    token = override_attention_backend(compiled, "torch_math", where="blocks.0.*")
    assert token.report.switched == NAMES[:2]
    assert inner.backend is AttentionBackend.TORCH_MATH
    assert attention_state(compiled) == attention_state(model)
    wrapped: Any = torch.compile(Attention(4, 8), backend="eager")
    assert override_attention_backend(wrapped, "torch_math").report.switched == ("",)
    prepare_attention_backend_override(wrapped, "torch_flash")
    apply_attention_backend_override(wrapped, "torch_flash")
    assert wrapped.backend is AttentionBackend.TORCH_FLASH


def test_parts_that_came_later_are_found(model: nn.Module) -> None:
    """Names are kept from one override to the next, but never those of another structure."""
    override_attention_backend(model, "torch_math")
    first: Any = model.blocks[0]  # type: ignore[index]
    first["late"] = late = Attention(4, 8)
    report = override_attention_backend(model, "torch_math").report
    assert report.switched == ("blocks.0.late",)
    head: Any = model.head
    head.inner = inner = Attention(4, 8)  # in what was a leaf
    first["self"] = other = Attention(4, 8, 2, is_causal=True)
    del first["cross"]
    report = override_attention_backend(model, "torch_flash").report
    found = ("blocks.0.late", "blocks.0.self", *NAMES[2:], "head.inner")
    assert sorted(report.switched) == sorted(found)
    assert support.backends(model) == ["torch_flash"] * 5
    override_attention_backend(model, "torch_math")
    assert [str(layer._override) for layer in (late, other, inner)] == ["torch_math"] * 3


def test_a_model_whose_parts_know_it_is_freed() -> None:
    model = nn.Sequential(Attention(4, 8), nn.Linear(2, 2))
    model[1].above = [model]  # type: ignore[assignment]
    override_attention_backend(model, "torch_math")
    gone = [weakref.ref(module) for module in model.modules()]
    del model
    gc.collect()
    assert [module() for module in gone] == [None] * 3


def test_a_shared_layer_is_one_layer_under_any_of_its_names() -> None:
    shared = Attention(4, 8)
    decoder = nn.Sequential(shared, Attention(4, 8))
    model = nn.ModuleDict({"encoder": nn.Sequential(shared), "decoder": decoder})
    assert override_attention_backend(model, "torch_math").report.switched == (
        "encoder.0",
        "decoder.1",
    )
    token = override_attention_backend(model, "torch_flash", where="decoder.*")
    assert token.report.switched == ("decoder.0", "decoder.1")
    assert shared.backend is AttentionBackend.TORCH_FLASH
    with pytest.raises(REFUSED, match="0 of 2 layers changed"):
        override_attention_backend(model, "torch_math", where="nothing")


def test_modules_that_contain_themselves_are_walked_once() -> None:
    layer = Attention(4, 8)
    layer.add_module("parent", nn.ModuleDict({"attn": layer}))
    token = override_attention_backend(layer, "torch_math")
    assert token.report.switched == ("",)


def test_dry_run_reports_and_changes_nothing(model: nn.Module, script: Any) -> None:
    before = attention_state(model)
    token = override_attention_backend(model, "scripted_one", where="*.self", dry_run=True)
    assert token.report.switched == ("blocks.0.self", "blocks.1.self")
    assert script.counts["prepare", "scripted_one"] == 2
    assert attention_state(model) == before
    token.undo()
    assert attention_state(model) == before
    with pytest.raises(REFUSED, match="flashinfer_fa3"):
        override_attention_backend(model, "flashinfer_fa3", dry_run=True)


def test_generations_count_changes(model: nn.Module) -> None:
    first = override_attention_backend(model, "torch_math", where="blocks.0.*")
    second = override_attention_backend(model, "torch_math")
    assert second.report.switched == NAMES[2:]
    assert second.report.unchanged == NAMES[:2]
    assert second.report.generation > first.report.generation
    third = override_attention_backend(model, "torch_math")
    assert third.report.switched == ()
    assert third.report.unchanged == NAMES
    assert third.report.generation == second.report.generation


@pytest.mark.usefixtures("script")
def test_undo_gives_back_exactly_what_was(model: nn.Module) -> None:
    override_attention_backend(model, "torch_math", where="blocks.1.self")
    before, ran = attention_state(model), run(model)
    token = override_attention_backend(model, "scripted_one", where="*.self")
    assert support.backends(model) == ["scripted_one", "torch_flash"] * 2
    assert run(model) == ["scripted_one"] * 2 + ["torch_flash"] * 2, "in order of the first call"
    token.undo()
    assert attention_state(model) == before
    assert run(model) == ran
    token.undo()
    assert attention_state(model) == before


def test_undo_out_of_order_is_refused_and_changes_nothing(model: nn.Module) -> None:
    before = attention_state(model)
    first = override_attention_backend(model, "torch_math")
    middle = attention_state(model)
    second = override_attention_backend(model, "torch_flash", where="blocks.0.*")
    state = attention_state(model)
    text = f"override {first.report.generation} can't be undone out of order"
    with pytest.raises(REFUSED, match=text) as error:
        first.undo()
    assert set(error.value.refused) == set(NAMES[:2])
    assert all(
        f"changed later, by override {second.report.generation}; undo that one first" in why
        for why in error.value.refused.values()
    )
    assert attention_state(model) == state
    second.undo()
    assert attention_state(model) == middle
    first.undo()
    assert attention_state(model) == before


def test_changes_of_single_layers_stand_in_the_way_of_undo(model: nn.Module) -> None:
    token = override_attention_backend(model, "torch_math")
    apply_attention_backend_override(support.layers(model)[2], None)
    with pytest.raises(REFUSED, match=r"blocks\.1\.self"):
        token.undo()
    assert support.backends(model).count("torch_math") == 3


def test_overrides_of_other_layers_undo_in_any_order(model: nn.Module) -> None:
    before = attention_state(model)
    first = override_attention_backend(model, "torch_math", where="blocks.0.*")
    second = override_attention_backend(model, "torch_math", where="blocks.1.*")
    first.undo()
    assert support.backends(model) == ["torch_flash"] * 2 + ["torch_math"] * 2
    second.undo()
    assert attention_state(model) == before


def test_context_manager_undoes(model: nn.Module) -> None:
    before = attention_state(model)
    with override_attention_backend(model, "torch_math") as token:
        assert token.report.switched == NAMES
        with override_attention_backend(model, "torch_flash", where="*.self"):
            assert support.backends(model) == ["torch_flash", "torch_math"] * 2
        assert support.backends(model) == ["torch_math"] * 4
    assert attention_state(model) == before
    with pytest.raises(KeyError), override_attention_backend(model, "torch_math"):
        raise KeyError
    assert attention_state(model) == before
    with override_attention_backend(model, "torch_math") as token:
        token.undo()
    assert attention_state(model) == before


def test_a_context_does_not_hide_the_error_of_its_body(model: nn.Module) -> None:
    def body() -> None:
        with override_attention_backend(model, "torch_math"):
            override_attention_backend(model, "torch_flash")
            raise KeyError("body")

    with pytest.raises(REFUSED, match="out of order") as error:
        body()
    assert isinstance(error.value.__context__, KeyError)


def test_contexts_leak_nothing(model: nn.Module) -> None:
    state = attention_state(model)
    with override_attention_backend(model, "torch_math"):
        pass
    (group,) = {layer._group for layer in support.layers(model)}
    route = group.route
    for _ in range(100):
        with override_attention_backend(model, "torch_math"):
            pass
    assert attention_state(model) == state
    assert {layer._group for layer in support.layers(model)} == {group}
    assert group.route is route
    assert len(group._routes) == 2


def test_none_is_the_construction_default() -> None:
    model = support.Stack(Attention(4, 8, backend="torch_math"), Attention(4, 8))
    override_attention_backend(model, "torch_flash")
    token = override_attention_backend(model, None)
    assert token.report.switched == ("layers.0", "layers.1")
    assert support.backends(model) == ["torch_math", "torch_flash"]
    token.undo()
    assert support.backends(model) == ["torch_flash", "torch_flash"]
    apply_attention_backend_override(support.layers(model)[0], None)
    assert support.backends(model) == ["torch_math", "torch_flash"]


@pytest.mark.usefixtures("script")
def test_pinned_layers_are_reported_and_never_switched() -> None:
    pinned = Attention(4, 8, required_backend="torch_math")
    model = support.Stack(Attention(4, 8), pinned, Attention(4, 8))
    for target in ("scripted_one", "torch_math", None, "torch_flash"):
        report = override_attention_backend(model, target).report
        assert report.pinned == ("layers.1",)
        assert "layers.1" not in report.switched + report.unchanged
        assert pinned.backend is AttentionBackend.TORCH_MATH
    with torch_ops.use_backend("inductor"):
        assert run(support.Stack(pinned)) == ["torch_math"]


def test_all_pinned_changes_nothing_and_says_so() -> None:
    model = support.Stack(*(Attention(4, 8, required_backend="torch_math") for _ in range(3)))
    text = r"0 of 3 layers changed \(3 selected ones are pinned\)"
    with pytest.raises(REFUSED, match=text) as error:
        override_attention_backend(model, "torch_flash")
    reason = ("pinned to required_backend 'torch_math'",)
    assert error.value.refused == {f"layers.{i}": reason for i in range(3)}
    report = override_attention_backend(model, "torch_flash", allow_noop=True).report
    assert report.pinned == ("layers.0", "layers.1", "layers.2")


@pytest.mark.parametrize(
    "change", [apply_attention_backend_override, prepare_attention_backend_override]
)
def test_a_pinned_layer_alone_is_refused(
    change: Callable[[Attention, str], None],
) -> None:
    layer = Attention(4, 8, required_backend="torch_math")
    before = attention_state(layer)
    text = r"'torch_flash' is refused by Attention:\n.*pinned to required_backend 'torch_math'"
    with pytest.raises(REFUSED, match=text):
        change(layer, "torch_flash")
    change(layer, "torch_math")
    apply_attention_backend_override(layer, None)
    assert layer.backend is AttentionBackend.TORCH_MATH
    assert attention_state(Attention(4, 8, required_backend="torch_math")) == before


def test_an_override_beats_scope_process_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Attention(4, 8, backend="torch_flash")
    model = support.Stack(layer)
    monkeypatch.setenv("TORCH_OPS_BACKEND", "inductor")
    torch_ops.refresh()
    assert layer.backend is AttentionBackend.INDUCTOR
    undo = torch_ops.set_backend("inductor")
    override_attention_backend(model, "torch_math")
    with torch_ops.use_backend("inductor"):
        assert run(model) == ["torch_math"]
    undo()
    assert layer.backend is AttentionBackend.TORCH_MATH
    with torch_ops.trace() as trace:
        layer(*support.inputs(layer))
    assert [record.source for record in trace.records] == ["layer"]


def test_refusal_names_every_layer_with_every_reason() -> None:
    plain = Attention(4, 8)
    capped = Attention(4, 8, logits_soft_cap=5.0)
    strict = Attention(4, 8, logits_soft_cap=2.5, supported_backends=["inductor"])
    model = support.Stack(plain, capped, strict)
    before = attention_state(model)
    with pytest.raises(REFUSED, match=r"'torch_math' is refused by 2 of 3 layers:") as error:
        override_attention_backend(model, "torch_math")
    assert error.value.refused == {
        "layers.1": ("logits_soft_cap 5.0 (supported: 0.0)",),
        "layers.2": (
            "not among the layer's supported_backends ('inductor')",
            "logits_soft_cap 2.5 (supported: 0.0)",
        ),
    }
    text = str(error.value)
    assert isinstance(error.value, ValueError)
    for name, reasons in error.value.refused.items():
        for reason in reasons:
            assert f"{name}  {reason}" in text
    assert "layers.0" not in text
    assert text.endswith("Nothing was changed.")
    assert attention_state(model) == before
    report = override_attention_backend(
        model, "torch_math", where=lambda name, layer: not layer.spec.logits_soft_cap
    ).report
    assert report.switched == ("layers.0",)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("torch_cudnn", r"device cpu (supported: cuda)"),
        ("aiter", "no installed backend serves 'aiter'"),
    ],
)
def test_families_that_cannot_run_on_a_cpu_say_why(target: str, reason: str) -> None:
    layer = Attention(4, 8)
    for change in (override_attention_backend, apply_attention_backend_override):
        with pytest.raises(REFUSED, match=re.escape(reason)):
            change(layer, target)
    with pytest.raises(REFUSED, match=re.escape(reason)):
        prepare_attention_backend_override(layer, target)


def test_disabled_backends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = support.stack(2)
    override_attention_backend(model, "torch_math", where="layers.0")
    before = attention_state(model)
    monkeypatch.setenv("TORCH_OPS_DISABLE", "attention:torch")
    torch_ops.refresh()
    reason = "disabled by TORCH_OPS_DISABLE=attention:torch"
    with pytest.raises(REFUSED, match=reason):
        override_attention_backend(model, "torch_math")
    with pytest.raises(torch_ops.BackendUnavailableError, match=reason):
        support.layers(model)[0](*support.inputs(Attention(4, 8, 2)))
    assert support.layers(model)[1].backend is AttentionBackend.INDUCTOR
    monkeypatch.delenv("TORCH_OPS_DISABLE")
    torch_ops.refresh()
    assert attention_state(model) == before


def test_prepare_then_apply_prepares_once(script: Any) -> None:
    layer = Attention(4, 8, 2)
    prepare_attention_backend_override(layer, "scripted_one")
    assert layer.backend is AttentionBackend.TORCH_FLASH, "prepare changes nothing"
    assert script.counts["prepare", "scripted_one"] == 1
    ran = script.counts["run", "scripted_one"]
    assert ran == 2, "a batch and one sequence are run in prepare"
    for target in ("scripted_one", "torch_math", "scripted_one", None, "scripted_one"):
        apply_attention_backend_override(layer, target)
    assert script.counts["prepare", "scripted_one"] == 1
    assert script.counts["run", "scripted_one"] == ran
    assert layer(*support.inputs(layer)).eq(1).all()


COUNT = 4


def scripted() -> ModuleType:
    """The attention module of the scripted backend."""
    return importlib.import_module("torch_ops_scripted.attention")


def changed(model: nn.Module, target: str) -> Callable[[], object]:
    return lambda: override_attention_backend(model, target)


@pytest.mark.parametrize("index", range(COUNT))
@pytest.mark.parametrize("step", ["supports", "prepare", "run"])
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("planted"),
        torch.OutOfMemoryError("planted: tried to allocate 80.00 GiB"),
        MemoryError("planted"),
        ImportError("planted"),
        NotImplementedError("planted"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_at_any_layer_changes_nothing(
    script: Any, index: int, step: str, error: Exception
) -> None:
    model = support.stack(COUNT)
    inputs = support.inputs(Attention(4, 8, 2))
    override_attention_backend(model, "scripted_one", where="layers.[02]")
    out, ran = model(*inputs), run(model)
    before, held = attention_state(model), workspaces(model)

    def fail() -> object:
        raise error

    script.acts[step, "scripted_two", index + 1.0] = fail
    with pytest.raises(REFUSED, match=f"{type(error).__name__}: planted") as refusal:
        override_attention_backend(model, "scripted_two")
    assert set(refusal.value.refused) == {f"layers.{index}"}
    assert attention_state(model) == before
    assert workspaces(model) == held, "what was prepared for nothing is still held"
    del script.acts[step, "scripted_two", index + 1.0]
    assert torch.equal(model(*inputs), out)
    assert run(model) == ran
    override_attention_backend(model, "scripted_two")
    assert model(*inputs).eq(2).all()


def workspaces(model: nn.Module) -> list[set[str]]:
    return [{str(key) for key in layer._cache._prepared} for layer in support.layers(model)]


def test_every_failing_layer_is_named(script: Any) -> None:
    model = support.stack(COUNT)
    before = attention_state(model)
    script.acts["supports", "scripted_one", 2.0] = lambda: "scale 2.0 (supported: 1.0)"

    def fail() -> object:
        raise OSError("no space left on device")

    script.acts["prepare", "scripted_one", 4.0] = fail
    with pytest.raises(REFUSED, match="is refused by 2 of 4 layers") as error:
        override_attention_backend(model, "scripted_one")
    assert error.value.refused == {
        "layers.1": ("scale 2.0 (supported: 1.0)",),
        "layers.3": ("preparing 'scripted_one' raised OSError: no space left on device",),
    }
    assert attention_state(model) == before


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupts_come_through_and_change_nothing(
    script: Any, interrupt: type[BaseException]
) -> None:
    model = support.stack(COUNT)
    before, held = attention_state(model), workspaces(model)

    def stop() -> object:
        raise interrupt

    script.acts["prepare", "scripted_one", 3.0] = stop
    with pytest.raises(interrupt):
        override_attention_backend(model, "scripted_one")
    assert attention_state(model) == before
    assert workspaces(model) == held
    del script.acts["prepare", "scripted_one", 3.0]
    override_attention_backend(model, "scripted_one")
    assert support.backends(model) == ["scripted_one"] * COUNT


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: override_attention_backend(layer, "scripted_one"),
        lambda layer: apply_attention_backend_override(layer, "scripted_one"),
        lambda layer: prepare_attention_backend_override(layer, "scripted_one"),
    ],
)
def test_resolving_to_another_family_is_refused(
    script: Any, change: Callable[[Attention], object]
) -> None:
    layer = Attention(4, 8, scale=1.0)
    before = attention_state(layer)

    def other() -> object:
        return scripted().Filled(layer.spec, AttentionBackend("scripted_two"))

    script.acts["prepare", "scripted_one", 1.0] = other
    text = (
        "Attention backend override 'scripted_one' resolved to 'scripted_two' on Attention; "
        "refusing the request instead of silently falling back"
    )
    with pytest.raises(REFUSED, match=re.escape(text)) as error:
        change(layer)
    assert list(error.value.refused.values()) == [(text,)]
    assert attention_state(layer) == before
    assert script.counts["run", "scripted_two"] == 0


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda q, k, v: None, "returned None, expected torch.float32 [2, 2, 4, 8]"),
        (lambda q, k, v: q[:, :1].clone(), "returned torch.float32 [2, 1, 4, 8], expected"),
        (lambda q, k, v: q.double(), "returned torch.float64 [2, 2, 4, 8], expected torch.float32"),
        (lambda q, k, v: q, "returned memory of its arguments, expected a fresh tensor"),
        (lambda q, k, v: v[:, :2].repeat(1, 1, 2, 1)[:], None),
    ],
)
def test_the_first_run_is_checked(
    script: Any, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any], text: str | None
) -> None:
    monkeypatch.setattr(scripted().Filled, "run", lambda self, q, k, v: run(q, k, v))
    layer = Attention(4, 8, 2)
    if text is None:
        override_attention_backend(layer, "scripted_one")
        return
    with pytest.raises(REFUSED, match=re.escape(f"TypeError: run() of 'scripted_one' {text}")):
        override_attention_backend(layer, "scripted_one")


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda q: None, "returned a NoneType (accepted: torch.float32 [2, 3, 4, 8], as 'q')"),
        (lambda q: q[:, :1].clone(), "returned torch.float32 [2, 1, 4, 8] (accepted"),
        (lambda q: q.double(), "returned torch.float64 [2, 3, 4, 8] (accepted"),
    ],
    ids=["None", "shape", "dtype"],
)
def test_later_runs_are_checked(
    script: Any, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any], text: str
) -> None:
    layer = Attention(4, 8, 2)
    override_attention_backend(layer, "scripted_one")
    monkeypatch.setattr(scripted().Filled, "run", lambda self, q, k, v: run(q))
    with pytest.raises(torch_ops.DeclarationError, match=re.escape(text)):
        layer(*support.inputs(layer))


def test_outputs_with_other_strides_are_made_contiguous(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        strided: torch.Tensor = (q + 1).transpose(1, 2).contiguous().transpose(1, 2)
        return strided

    monkeypatch.setattr(scripted().Filled, "run", run)
    layer = Attention(4, 8, 2)
    override_attention_backend(layer, "scripted_one")
    q, k, v = support.inputs(layer)
    assert layer(q, k, v).is_contiguous()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), q + 1)


def test_no_override_while_code_is_traced(model: nn.Module) -> None:
    layer = Attention(4, 8)
    inputs = support.inputs(layer)
    before = attention_state(layer)

    def swap(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        override_attention_backend(layer, "torch_math")
        out: torch.Tensor = layer(q, k, v)
        return out

    text = "An attention override can't happen inside code that torch.compile traces"
    with pytest.raises(Exception, match=text):
        torch.compile(swap, fullgraph=True, backend="eager")(*inputs)
    assert attention_state(layer) == before


def test_an_override_is_not_undone_in_a_capture_or_in_traced_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = Attention(4, 8, 2)
    token = override_attention_backend(layer, "torch_math")
    state = attention_state(layer)
    with monkeypatch.context() as patched:
        patched.setattr(once, "capturing", lambda: True)
        with pytest.raises(torch_ops.CaptureError, match="Undoing an attention override"):
            token.undo()

    def undone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        token.undo()
        out: torch.Tensor = layer(q, k, v)
        return out

    with pytest.raises(Exception, match="Undoing an attention override can't happen inside code"):
        torch.compile(undone, fullgraph=True, backend="eager")(*support.inputs(layer))
    assert attention_state(layer) == state
    token.undo()
    assert attention_state(layer) != state


def test_state_is_equal_for_equal_models(model: nn.Module) -> None:
    twin = support.stack(3)
    assert attention_state(twin) == attention_state(support.stack(3))
    assert attention_state(twin) != attention_state(support.stack(2))
    state = attention_state(twin)
    twin(*support.inputs(support.layers(twin)[0], dtype=torch.bfloat16))
    assert attention_state(twin) == state, "a call changed what would run"
    override_attention_backend(twin, "torch_math", where="layers.1")
    assert attention_state(twin) != state
