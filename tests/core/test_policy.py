"""Who decides: call, scope, process, environment, tuned table, declared order; and for whom."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import torch_ops
from torch_ops import (
    Backend,
    BackendUnavailableError,
    Platform,
    Requirement,
    TorchOpsError,
    UnknownBackendError,
    UnknownOpError,
    ops,
    policy,
)

from .toy import Toy

CPU = Platform.cpu()
VALUES = {"torch": 1.0, "inductor": 2.0, "triton": 3.0, "flashinfer": 4.0, "aiter": 5.0}


@pytest.fixture
def served(toy: Toy) -> Toy:
    """The op with five backends that are all usable; three are in the order of a CPU."""
    for backend, value in VALUES.items():
        toy.serve(backend, value)
    return toy


SOURCES = ("call", "scope", "process", "environment", "tuned", "declared")


@pytest.mark.parametrize("first", range(len(SOURCES)))
def test_the_first_source_that_speaks_decides(
    first: int, served: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sources from the given one on speak, each for another backend."""
    speaking = SOURCES[first:]
    wants = dict(
        zip(SOURCES, ("aiter", "flashinfer", "triton", "aiter", "inductor", "torch"), strict=True)
    )
    if "environment" in speaking:
        monkeypatch.setenv("TORCH_OPS_BACKEND", f"toy={wants['environment']}")
        torch_ops.refresh()
    if "tuned" in speaking:
        monkeypatch.setitem(policy.tuned, ("cpu", None, "toy"), Backend(wants["tuned"]))
        policy.invalidate()
    if "process" in speaking:
        torch_ops.set_backend(toy=wants["process"])
    scope = torch_ops.use_backend(toy=wants["scope"]) if "scope" in speaking else None
    backend = wants["call"] if "call" in speaking else None

    def judge() -> None:
        expected = Backend(wants[speaking[0]])
        assert served(backend) == VALUES[expected.value]
        explained = torch_ops.explain("toy", torch.ones(2), backend=backend)
        assert (explained.chosen, explained.source) == (expected, speaking[0])
        with torch_ops.trace() as seen:
            served(backend)
        assert [(r.backend, r.source) for r in seen.records] == [(expected, speaking[0])]
        assert torch_ops.select_kernel("toy", backend, platform=CPU).backend == expected

    if scope is None:
        judge()
    else:
        with scope:
            judge()


@pytest.mark.parametrize("source", ["call", "scope", "process", "environment"])
def test_a_choice_is_strict(source: str, served: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """That backend runs or the call raises; nothing else runs in its place."""
    served.serve("sgl_kernel", 6, requires=[Requirement.cuda((9, 0))])
    if source == "environment":
        monkeypatch.setenv("TORCH_OPS_BACKEND", "sgl_kernel")
        torch_ops.refresh()
    if source == "process":
        torch_ops.set_backend("sgl_kernel")
    scope = torch_ops.use_backend("sgl_kernel" if source == "scope" else None)
    backend = "sgl_kernel" if source == "call" else None
    with scope, pytest.raises(BackendUnavailableError) as raised:
        served(backend)
    assert raised.value.reasons == ("CUDA only (device is 'cpu')",)
    assert f"op 'toy': backend 'sgl_kernel', chosen by {source}, is not" in str(raised.value)
    assert not served.calls


def test_a_choice_of_a_backend_that_the_op_has_not(served: Toy) -> None:
    with torch_ops.use_backend("sgl_kernel"):
        with pytest.raises(UnknownBackendError, match="No 'sgl_kernel' backend registered for op"):
            served()
        assert ops.rms_norm(torch.ones(2, 4), backend="torch").shape == (2, 4)


def test_scope_of_single_ops(served: Toy) -> None:
    x = torch.randn(2, 8)
    with torch_ops.use_backend(toy="triton"), torch_ops.trace() as seen:
        assert served() == 3
        ops.silu_and_mul(x)
    assert [(r.op, r.backend, r.source) for r in seen.records] == [
        ("toy", Backend.TRITON, "scope"),
        ("silu_and_mul", Backend.TORCH, "declared"),
    ]
    with torch_ops.use_backend("triton", toy="aiter", silu_and_mul="torch"):
        assert served() == 5
        assert ops.silu_and_mul(x).shape == (2, 4)
        with pytest.raises(TorchOpsError, match="'triton'"):
            ops.gelu_and_mul(x)


def test_scopes_nest(served: Toy) -> None:
    """The inner one wins where it speaks; what it leaves open is the outer one's."""
    with torch_ops.use_backend("aiter"):
        assert served() == 5
        with torch_ops.use_backend(silu_and_mul="torch"):
            assert served() == 5
            with torch_ops.use_backend(toy="triton"):
                assert served() == 3
                with torch_ops.use_backend("flashinfer"):
                    assert served() == 4
                assert served() == 3
            assert served() == 5
        with torch_ops.use_backend():
            assert served() == 5
    assert served() == 1


def test_scope_ends_with_an_exception(served: Toy) -> None:
    def fail() -> None:
        with torch_ops.use_backend("aiter"):
            assert served() == 5
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert served() == 1
    assert policy.current_scope() is None


def test_scope_object_can_be_reused_and_nested(served: Toy) -> None:
    scope = torch_ops.use_backend("aiter")
    for _ in range(3):
        with scope:
            with torch_ops.use_backend("triton"), scope:
                assert served() == 5
            assert served() == 5
        assert served() == 1


def test_one_scope_object_in_threads_and_tasks(served: Toy) -> None:
    """Entered by one, then by another, and left first by the one that was first."""
    scope = torch_ops.use_backend("aiter")

    async def tasks() -> None:
        first_in, second_in, first_out = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def first() -> None:
            with scope:
                first_in.set()
                await second_in.wait()
                assert served() == 5
            assert served() == 1
            first_out.set()

        async def second() -> None:
            await first_in.wait()
            assert served() == 1
            with scope:
                second_in.set()
                await first_out.wait()
                assert served() == 5
            assert served() == 1

        await asyncio.gather(first(), second())

    asyncio.run(tasks())
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> list[float]:
        with scope:
            first_in.set()
            assert second_in.wait(20)
            inside = served()
        first_out.set()
        return [inside, served()]

    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(first)
        assert first_in.wait(20)
        with scope:
            second_in.set()
            assert first_out.wait(20)
            assert served() == 5
        assert outcome.result() == [5, 1]
    assert served() == 1


def test_scope_is_invisible_to_other_threads_and_tasks(served: Toy) -> None:
    with torch_ops.use_backend("aiter"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(served).result() == 1
        assert served() == 5

    async def scoped(started: asyncio.Event, seen: asyncio.Event) -> None:
        with torch_ops.use_backend("aiter"):
            started.set()
            await seen.wait()
            assert served() == 5

    async def outside(started: asyncio.Event, seen: asyncio.Event) -> None:
        await started.wait()
        assert served() == 1
        seen.set()

    async def child() -> float:
        return served()

    async def main() -> None:
        started, seen = asyncio.Event(), asyncio.Event()
        await asyncio.gather(scoped(started, seen), outside(started, seen))
        with torch_ops.use_backend("triton"):
            task = asyncio.create_task(child())
        assert await task == 3  # a task has the context in which it was made
        assert served() == 1

    asyncio.run(main())


def test_scope_travels_with_a_copied_context(served: Toy) -> None:
    with torch_ops.use_backend("aiter"):
        context = contextvars.copy_context()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(context.run, served).result() == 5
        assert pool.submit(served).result() == 1


def test_process_choice_is_seen_by_all_threads(served: Toy) -> None:
    undo = torch_ops.set_backend("aiter")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(served).result() == served() == 5
        undo()
        assert pool.submit(served).result() == served() == 1


def test_process_choices_are_undone_in_any_order(served: Toy) -> None:
    first = torch_ops.set_backend("aiter")
    second = torch_ops.set_backend(toy="triton")
    third = torch_ops.set_backend(toy="triton")
    assert served() == 3
    third()
    assert served() == 3
    first()
    assert served() == 3
    second()
    assert served() == 1
    second()
    first()
    assert served() == 1


def test_process_choice_of_an_op_is_cleared_by_none(served: Toy) -> None:
    torch_ops.set_backend("aiter")
    undo = torch_ops.set_backend(toy=None)
    assert served() == 1
    undo()
    assert served() == 5
    torch_ops.set_backend("triton", toy=None)
    assert served() == 1


def test_same_choice_again_is_undone_on_its_own(served: Toy) -> None:
    """Two calls with equal arguments are two choices."""
    one, two = torch_ops.set_backend("aiter"), torch_ops.set_backend("aiter")
    one()
    assert served() == 5
    two()
    assert served() == 1


@pytest.mark.parametrize("choose", [torch_ops.use_backend, torch_ops.set_backend])
def test_what_cannot_be_chosen(choose: Callable[..., Any]) -> None:
    with pytest.raises(UnknownOpError) as raised:
        choose(rms_nrom="torch")
    assert "No kernels registered for op 'rms_nrom'" in str(raised.value)
    assert "Did you mean 'rms_norm'?" in str(raised.value)
    with pytest.raises(ValueError, match=r"'tritn' is not a Backend.*Did you mean 'triton'\?"):
        choose("tritn")
    with pytest.raises(ValueError, match=r"'tritn' is not a Backend"):
        choose(rms_norm="tritn")
    with pytest.raises(UnknownOpError, match="op 'backend'"):
        choose(backend="torch")
    assert policy.current_scope() is None
    assert policy._process == []


def test_none_is_no_backend_of_an_op() -> None:
    with pytest.raises(TypeError, match="backend of op 'rms_norm' must be a Backend or str, not"):
        torch_ops.use_backend(rms_norm=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", [5, object(), ["torch"]], ids=lambda v: type(v).__name__)
def test_a_backend_is_a_member_or_its_value(backend: Any, served: Toy) -> None:
    with pytest.raises(TypeError, match=r"op 'toy': argument 'backend' must be a Backend or str"):
        ops.toy(torch.ones(2), backend=backend)
    with pytest.raises(ValueError, match="is not a Backend"):
        torch_ops.use_backend(backend)


def test_nothing_is_kept_past_a_change(served: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve, which makes a plan; change; resolve again: environment, process, registry."""
    assert [served() for _ in range(3)] == [1, 1, 1]
    monkeypatch.setenv("TORCH_OPS_BACKEND", "toy=triton")
    generation = policy.generation
    torch_ops.refresh()
    assert policy.generation > generation
    assert served() == 3
    undo = torch_ops.set_backend(toy="aiter")
    assert served() == 5
    undo()
    assert served() == 3
    monkeypatch.setenv("TORCH_OPS_DISABLE", "toy:torch")
    monkeypatch.delenv("TORCH_OPS_BACKEND")
    torch_ops.refresh()
    assert served() == 2
    (spec,) = [s for s in torch_ops.registry.get("toy") if s.backend == "inductor"]
    torch_ops.registry.unregister(spec)
    assert served() == 3
    torch_ops.registry.register(spec)
    assert served() == 2


def test_scope_around_an_exhausted_stack_of_changes(served: Toy) -> None:
    """A hundred times in and out leave no trace: one scope object per distinct choice."""
    before = len(policy._interned)
    for _ in range(100):
        with torch_ops.use_backend("aiter"), torch_ops.use_backend(toy="triton"):
            assert served() == 3
    assert len(policy._interned) - before <= 2
    assert served() == 1


def test_traced_code_cannot_choose(served: Toy) -> None:
    def scoped(x: torch.Tensor) -> Any:
        with torch_ops.use_backend("aiter"):
            return ops.toy(x)

    def process(x: torch.Tensor) -> Any:
        torch_ops.set_backend("aiter")
        return ops.toy(x)

    def debugged(x: torch.Tensor) -> Any:
        with torch_ops.debug():
            return ops.toy(x)

    def traced(x: torch.Tensor) -> Any:
        with torch_ops.trace():
            return ops.toy(x)

    for function in (scoped, process, debugged, traced):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        with pytest.raises(
            Exception, match=r"inside code that torch\.compile traces; pass backend="
        ):
            compiled(torch.ones(2))
    assert policy._process == []
    assert served() == 1


def test_traced_code_cannot_choose_even_where_graphs_may_break(served: Toy) -> None:
    """The frame then runs as it is, and the choice takes effect: nothing is stale."""

    def scoped(x: torch.Tensor) -> Any:
        with torch_ops.use_backend("aiter"):
            return ops.toy(x)

    torch._dynamo.reset()
    compiled = torch.compile(scoped, backend="eager")
    assert compiled(torch.ones(2)).eq(5).all()


def test_refresh_under_threads(served: Toy) -> None:
    """Eight threads call, list and resolve while others refresh and change: never an error.

    Each call gives the number of a backend that was chosen at some moment of it.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    stop = threading.Event()
    problems: list[BaseException] = []
    counts = [0] * 8
    x, weight = torch.randn(2, 4), torch.randn(4)

    def call(index: int) -> None:
        try:
            while not stop.is_set():
                assert served() in (1.0, 5.0)
                ops.rms_norm(x, weight)
                assert "torch" in [b.value for b in ops.rms_norm.backends()]
                assert torch_ops.select_kernel("rms_norm", platform=CPU).backend is Backend.TORCH
                assert torch_ops.explain("toy", x).chosen is not None
                counts[index] += 1
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 1.5
    while time.monotonic() < end and not problems:
        undo = torch_ops.set_backend(toy="aiter")
        torch_ops.refresh()
        undo()
        torch_ops.refresh()
    stop.set()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not problems, problems[0]
    assert all(counts)


def test_errors_leave_traced_code_with_the_same_text(served: Toy) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: ops.toy(x, backend="sgl_kernel"), backend="eager")
    with pytest.raises(TorchOpsError, match="No 'sgl_kernel' backend registered for op 'toy'"):
        ops.toy(torch.ones(2), backend="sgl_kernel")
    with pytest.raises(Exception, match="No 'sgl_kernel' backend registered for op 'toy'"):
        compiled(torch.ones(2))
