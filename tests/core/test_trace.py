"""`trace`: what ran, who chose it, how often, and what was skipped; nothing when it's closed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torch_ops
from torch_ops import Backend, BackendUnavailableError, Requirement, ops, tracing

from .toy import Toy


@pytest.fixture
def served(toy: Toy) -> Toy:
    toy.serve("torch", 1, requires=[Requirement.cuda()])
    toy.serve("inductor", 2, supports=lambda x, n: "n > 8 (supported: up to 8)" if n > 8 else None)
    toy.serve("triton", 3)
    return toy


def test_records(served: Toy) -> None:
    served()
    with torch_ops.trace() as seen:
        for _ in range(3):
            served()
        served(n=9)
        served("triton")
        with torch_ops.use_backend("triton"):
            served()
            served()
    served()
    first = ("torch", "CUDA only (device is 'cpu')")
    assert [(r.op, r.backend, r.source, r.count, r.skipped) for r in seen.records] == [
        ("toy", Backend.INDUCTOR, "declared", 3, (first,)),
        (
            "toy",
            Backend.TRITON,
            "declared",
            1,
            (first, ("inductor", "n > 8 (supported: up to 8)")),
        ),
        ("toy", Backend.TRITON, "call", 1, ()),
        ("toy", Backend.TRITON, "scope", 2, ()),
    ]
    table = str(seen).splitlines()
    assert table[0].split() == ["op", "backend", "source", "calls", "how", "skipped"]
    assert table[1].split()[:5] == ["toy", "inductor", "declared", "3", "ran"]
    assert len(table) == 5


def test_calls_that_raise_are_not_counted(served: Toy) -> None:
    with torch_ops.trace() as seen:
        with pytest.raises(BackendUnavailableError):
            served("torch")
        with pytest.raises(ValueError, match="argument 'n'"):
            served(n=-1)
    assert seen.records == []


def test_traces_nest_and_end(served: Toy) -> None:
    with torch_ops.trace() as outer:
        served()
        with torch_ops.trace() as inner:
            served()
        served()
    assert [r.count for r in outer.records] == [3]
    assert [r.count for r in inner.records] == [1]
    with pytest.raises(ZeroDivisionError), torch_ops.trace():
        raise ZeroDivisionError
    assert not tracing.active()


def test_threads_are_counted(served: Toy) -> None:
    with torch_ops.trace() as seen, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: served(), range(400)))
    assert [r.count for r in seen.records] == [400]


def test_compiled_calls_are_counted(served: Toy) -> None:
    """Also where the graph was compiled before the trace was opened."""
    compiled = torch.compile(lambda x: ops.toy(ops.toy(x)), backend="aot_eager", fullgraph=True)
    x = torch.ones(2, 3)
    compiled(x)
    with torch_ops.trace() as seen:
        compiled(x)
        compiled(x)
    assert [(r.backend, r.count) for r in seen.records] == [(Backend.INDUCTOR, 4)]


def test_a_closed_trace_costs_nothing(served: Toy) -> None:
    """The plan of a kernel that takes every call is the kernel itself again."""
    with torch_ops.trace():
        ops.silu_and_mul(torch.ones(2, 4))
    ops.silu_and_mul(torch.ones(2, 4))
    ops.silu_and_mul(torch.ones(2, 4))
    reference = ops.silu_and_mul.declaration.reference
    from torch_ops import policy

    assert any(plan is reference for plans in policy._plans for plan in plans.values())
