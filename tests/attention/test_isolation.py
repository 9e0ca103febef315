"""Models, threads and tasks: a swap here changes nothing there, and no call sees half of one."""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import os
import signal
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import torch_ops
from torch_ops.attention import (
    Attention,
    AttentionBackend,
    apply_attention_backend_override,
    attention_state,
    group,
    override_attention_backend,
)

from . import support

THREADS = 8
SWAPS = 500
FORWARDS = 20
FAMILIES = ("scripted_one", "scripted_two", "scripted_three")


def test_models_of_one_class_are_apart() -> None:
    a, b = support.stack(3), support.stack(3)
    inputs = support.inputs(support.layers(a)[0])
    before, out = attention_state(b), b(*inputs)
    with override_attention_backend(a, "torch_math"):
        assert support.backends(a) == ["torch_math"] * 3
        assert attention_state(b) == before
        assert torch.equal(b(*inputs), out)
        assert Attention(4, 8).backend is AttentionBackend.TORCH_FLASH
        assert support.backends(support.stack(3)) == ["torch_flash"] * 3
    assert attention_state(a) == before


@pytest.mark.usefixtures("fresh_dynamo", "script")
def test_compiled_models_of_one_class_are_apart() -> None:
    counters.clear()
    a, b = support.stack(2), support.stack(2)
    compiled_a, compiled_b = (torch.compile(m, backend="aot_eager", fullgraph=True) for m in (a, b))
    inputs = support.inputs(support.layers(a)[0])
    override_attention_backend(b, "scripted_three")
    for number, target in enumerate(FAMILIES, 1):
        override_attention_backend(a, target)
        assert compiled_a(*inputs).eq(number).all()
        assert compiled_b(*inputs).eq(3).all()
    assert counters["stats"]["unique_graphs"] <= 2


def test_a_draft_nested_in_its_target() -> None:
    target = nn.ModuleDict({"layers": support.stack(3), "draft": support.stack(2)})
    draft = target["draft"]
    before = attention_state(draft)
    report = override_attention_backend(target, "torch_math", where="layers.*").report
    assert len(report.switched) == 3
    assert attention_state(draft) == before
    report = override_attention_backend(draft, "torch_math", where="layers.1").report
    assert report.switched == ("layers.1",)
    assert support.backends(target) == ["torch_math"] * 3 + ["torch_flash", "torch_math"]
    report = override_attention_backend(target, "torch_math").report
    assert report.switched == ("draft.layers.0",)
    assert report.unchanged == (*(f"layers.layers.{i}" for i in range(3)), "draft.layers.1")


def test_a_draft_that_cannot_follow_stops_the_target() -> None:
    draft = support.Stack(Attention(4, 8, logits_soft_cap=30.0))
    target = nn.ModuleDict({"layers": support.stack(2), "draft": draft})
    before = attention_state(target)
    with pytest.raises(torch_ops.AttentionOverrideError, match=r"draft\.layers\.0") as error:
        override_attention_backend(target, "torch_math")
    assert set(error.value.refused) == {"draft.layers.0"}
    assert attention_state(target) == before


def test_copies_of_a_model_are_apart() -> None:
    model = support.stack(2)
    override_attention_backend(model, "torch_math", where="layers.0")
    twin = copy.deepcopy(model)
    assert attention_state(twin) == attention_state(model)
    override_attention_backend(twin, "torch_flash")
    assert support.backends(model) == ["torch_math", "torch_flash"]


def in_thread(call: Callable[[], object]) -> None:
    """Run in a thread of its own; what it raises comes out."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_an_override_in_another_thread_takes_effect_here() -> None:
    model, other = support.stack(2), support.stack(2)
    before = attention_state(other)
    tokens: list[Any] = []
    in_thread(lambda: tokens.append(override_attention_backend(model, "torch_math")))
    assert support.backends(model) == ["torch_math"] * 2
    assert attention_state(other) == before
    tokens[0].undo()
    assert attention_state(model) == before


def test_scopes_are_invisible_to_other_threads(script: Any) -> None:
    layer = Attention(4, 8)
    inputs = support.inputs(layer)
    entered, seen = threading.Event(), threading.Event()

    def scoped() -> None:
        with torch_ops.use_backend(attention="scripted"):
            assert layer(*inputs).eq(1).all()
            entered.set()
            assert seen.wait(30)
            assert layer(*inputs).eq(1).all()

    thread = threading.Thread(target=scoped)
    thread.start()
    assert entered.wait(30)
    assert not layer(*inputs).eq(1).any()
    assert layer.backend is AttentionBackend.TORCH_FLASH
    seen.set()
    thread.join()


def test_scopes_are_invisible_to_other_tasks(script: Any) -> None:
    layer = Attention(4, 8, 2)
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    inputs = support.inputs(layer)
    plain = layer(*inputs)

    async def scoped() -> None:
        for _ in range(5):
            with torch_ops.use_backend(attention="scripted"):
                await asyncio.sleep(0)
                assert layer(*inputs).eq(1).all()
                assert compiled(*inputs).eq(1).all()
            await asyncio.sleep(0)
            assert torch.equal(compiled(*inputs), plain)

    async def unscoped() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
            assert torch.equal(layer(*inputs), plain)
            assert torch.equal(compiled(*inputs), plain)

    async def both() -> None:
        await asyncio.gather(scoped(), unscoped(), scoped(), unscoped())

    asyncio.run(both())


def hammer(forward: Callable[[], Tensor], swap: Callable[[int], object]) -> list[Tensor]:
    """Run forwards in eight threads while this one swaps, until all have done their share."""
    stop = threading.Event()
    outputs: list[list[Tensor]] = [[] for _ in range(THREADS)]
    errors: list[BaseException] = []
    started = threading.Barrier(THREADS + 1)

    def loop(mine: list[Tensor]) -> None:
        try:
            started.wait(60)
            while not stop.is_set():
                mine.append(forward())
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=loop, args=(mine,)) for mine in outputs]
    for thread in threads:
        thread.start()
    started.wait(60)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        for index in itertools.count():
            swap(index)
            if errors or (index >= SWAPS and min(map(len, outputs)) >= FORWARDS):
                break
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors, errors
    return [out for mine in outputs for out in mine]


def sizes(model: nn.Module) -> tuple[int, ...]:
    """What must not grow: states, routes, and each layer's prepared kernels and plans."""
    gc.collect()
    layers = support.layers(model)
    return (
        len(group._states),
        sum(len(one._routes) for one in {layer._group for layer in layers}),
        sum(len(layer._cache._prepared) for layer in layers),
        sum(len(layer._cache._plans[1]) for layer in layers),
    )


@pytest.mark.usefixtures("fresh_dynamo", "script")
@pytest.mark.parametrize("compiled", [False, True])
def test_forwards_in_threads_while_layers_are_swapped(compiled: bool) -> None:
    counters.clear()
    model = support.stack(3)
    # Not fullgraph=True: torch 2.13 counts its frames for all threads together and then raises.
    call: Any = torch.compile(model, backend="aot_eager") if compiled else model
    inputs = support.inputs(support.layers(model)[0])

    def forward() -> Tensor:
        out: Tensor = call(*inputs)
        assert out.eq(out[:, :1, :1, :1, :1]).all(), "a layer's output is of two kernels"
        return out[:, 0, 0, 0, 0]

    def swap(index: int) -> None:
        if index % 5 == 4:
            layer = support.layers(model)[index % 3]
            apply_attention_backend_override(layer, FAMILIES[index % 2])
        else:
            override_attention_backend(model, FAMILIES[index % 3])

    for target in FAMILIES:
        override_attention_backend(model, target)
        forward()
    for index in range(60):  # every state that comes
        swap(index)
    before = sizes(model)
    seen = torch.stack(hammer(forward, swap))
    assert set(seen.flatten().tolist()) <= {1.0, 2.0, 3.0}
    assert len(seen.unique(dim=0)) > 1, "no swap came between two forwards"
    assert forward().tolist() == [FAMILIES.index(b) + 1 for b in support.backends(model)]
    assert sizes(model) == before
    assert counters["stats"]["unique_graphs"] == compiled
    assert not counters["graph_break"]


@pytest.mark.usefixtures("script")
def test_all_layers_change_in_one_step() -> None:
    """Other threads see a model before an override or after it, never in between."""
    model = support.stack(24)
    states = [layer.__dict__ for layer in support.layers(model)]
    nothing = torch.empty(0)

    def look() -> Tensor:
        groups = set(map(dict.__getitem__, states, itertools.repeat("_group")))  # one step, too
        assert len(groups) == 1, groups
        families = set(groups.pop().overrides.values())  # one read
        assert len(families) == 1, families
        return nothing

    def swap(index: int) -> None:
        if index % 3:
            override_attention_backend(model, FAMILIES[index % 3])
        else:
            with override_attention_backend(model, FAMILIES[0]):
                pass

    override_attention_backend(model, FAMILIES[1])
    hammer(look, swap)


@contextmanager
def preparing(script: Any, model: nn.Module, scale: float) -> Iterator[None]:
    """Hold a thread's override where it prepares the layer of a scale."""
    begun, done = threading.Event(), threading.Event()

    def slow() -> object:
        begun.set()
        assert done.wait(60)
        return None

    script.acts["prepare", "scripted_one", scale] = slow
    thread = threading.Thread(target=override_attention_backend, args=(model, "scripted_one"))
    thread.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_layers_go_on_while_an_override_prepares(script: Any) -> None:
    model = support.stack(3)
    inputs = support.inputs(support.layers(model)[0])
    out = model(*inputs)
    with preparing(script, model, 3.0):
        for _ in range(20):
            with torch_ops.trace():  # every plan is made anew
                assert torch.equal(model(*inputs), out)
        assert support.backends(model) == ["torch_flash"] * 3
    assert model(*inputs).eq(1).all()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_what_another_thread_prepares(script: Any) -> None:
    layer = Attention(4, 8, 2, scale=1.0, backend="scripted_two")
    inputs = support.inputs(layer)
    with preparing(script, layer, 1.0):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # a child that waits for ever ends by this
            layer(*inputs)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_plan_in_the_making_does_not_outlive_a_change(script: Any) -> None:
    layer = Attention(4, 8, 2, scale=1.0, backend="scripted_one")
    inputs = support.inputs(layer)
    undo = torch_ops.set_backend(attention="torch")
    plain = layer(*inputs)
    undo()
    preparing, changed = threading.Event(), threading.Event()

    def slow() -> object:
        preparing.set()
        assert changed.wait(60)
        return None

    script.acts["prepare", "scripted_one", 1.0] = slow
    outputs: list[Tensor] = []
    thread = threading.Thread(target=lambda: outputs.append(layer(*inputs)))
    thread.start()
    assert preparing.wait(60)
    undo = torch_ops.set_backend(attention="torch")
    assert torch.equal(layer(*inputs), plain)
    changed.set()
    thread.join()
    assert outputs[0].eq(1).all(), "it began before the change"
    assert torch.equal(layer(*inputs), plain)
    undo()
    assert layer(*inputs).eq(1).all()


@pytest.mark.usefixtures("script")
def test_forwards_in_threads_while_the_process_changes_its_mind() -> None:
    """A plan that was being made under the old choice must not stand after the change."""
    layer = Attention(4, 8, 2)
    inputs = support.inputs(layer)
    plain = layer(*inputs)

    def forward() -> Tensor:
        out: Tensor = layer(*inputs)
        assert out.eq(1).all() or torch.equal(out, plain)
        return out[0, 0, 0, 0]

    undo: list[Callable[[], None]] = []

    def swap(index: int) -> None:
        if index % 2 == 0:
            undo.append(torch_ops.set_backend(attention="scripted"))
            assert layer(*inputs).eq(1).all()
        else:
            undo.pop()()
            assert torch.equal(layer(*inputs), plain)

    hammer(forward, swap)
    while undo:
        undo.pop()()
    assert torch.equal(layer(*inputs), plain)


@pytest.mark.usefixtures("script")
def test_layers_are_prepared_once_by_many_threads(script: Any) -> None:
    layer = Attention(4, 8, 2, scale=1.0, backend="scripted_one")
    inputs = support.inputs(layer)
    script.acts["prepare", "scripted_one", 1.0] = lambda: threading.Event().wait(0.05) and None
    started = threading.Barrier(16)
    outputs: list[Tensor] = []

    def first_call() -> None:
        started.wait(30)
        outputs.append(layer(*inputs))

    threads = [threading.Thread(target=first_call) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 16
    assert all(out.eq(1).all() for out in outputs)
    assert script.counts["prepare", "scripted_one"] == 1


def test_a_copy_that_is_made_meanwhile_loses_no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shallow copy is of the group of its original, and brings its own override."""
    model = support.stack(2)
    override_attention_backend(model, "torch_math")
    of, copies = group.State.of, []
    thread = threading.Thread(target=lambda: copies.append(copy.copy(support.layers(model)[0])))

    def slowly(overrides: Any) -> group.State:
        if thread.ident is None:
            thread.start()
            thread.join(0.2)  # it waits, or has changed meanwhile what is being changed here
        return of(overrides)

    monkeypatch.setattr(group.State, "of", slowly)
    override_attention_backend(model, "torch_flash")
    thread.join()
    assert support.backends(model) == ["torch_flash"] * 2
    assert copies[0]._override is not None


@pytest.mark.usefixtures("script")
def test_overrides_of_two_threads_are_all_or_none() -> None:
    """Whoever comes last has all layers: two overrides of one model never mix."""
    model = support.stack(6)
    started = threading.Barrier(2)

    def switch(target: str) -> None:
        started.wait(30)
        for _ in range(100):
            override_attention_backend(model, target)

    threads = [threading.Thread(target=switch, args=(t,)) for t in FAMILIES[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(support.backends(model))) == 1


@pytest.mark.usefixtures("script")
def test_swaps_hold_no_memory() -> None:
    model = support.stack(3)
    inputs = support.inputs(support.layers(model)[0])

    def swap(times: int) -> None:
        for index in range(times):
            with override_attention_backend(model, FAMILIES[index % 3]):
                model(*inputs)

    swap(30)
    gc.collect()
    tracemalloc.start()
    try:
        swap(30)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        swap(300)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 300 * 16, f"{grown} bytes were kept over 300 swaps"
