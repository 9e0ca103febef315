"""References of ragged and paged ops read no data where they are traced, and are the same there."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_ops.declarations import _ragged, catalogue

from . import samples

OPS = [
    "append_paged_kv_",
    "apply_rope_append_paged_kv_",
    "mla_decode",
    "paged_decode",
    "paged_prefill",
    "varlen_attention_with_lse",
]


def reference(op: str) -> Callable[..., Any]:
    """The reference with code of its own: Dynamo leaves the code of loaded kernels alone."""
    plain: Any = catalogue()[op].reference
    code = plain.__code__.replace(co_name=f"{op}_traced")
    return types.FunctionType(code, plain.__globals__, None, plain.__defaults__)


def made(op: str, rows: int, call: Callable[..., Any]) -> list[Tensor]:
    args = samples.arguments(op, rows)
    return samples.outputs(op, args, call(*args.values()))


@pytest.mark.parametrize("op", [op for op in OPS if op != "paged_prefill"])  # its parts are theirs
def test_one_graph_over_sizes(op: str) -> None:
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    compiled = torch.compile(reference(op), fullgraph=True, dynamic=True, backend=counter)
    for rows in (7, 9, 31):
        torch.testing.assert_close(made(op, rows, compiled), made(op, rows, reference(op)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("op", OPS)
def test_fakes_and_proxies(op: str) -> None:
    """Neither a fake tensor nor one that is recorded can be read."""
    args, call = samples.arguments(op), reference(op)
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(a) if isinstance(a, Tensor) else a for n, a in args.items()}
        outputs = samples.outputs(op, fakes, call(*fakes.values()))
    real = made(op, 3, call)
    assert [(o.shape, o.dtype) for o in outputs] == [(o.shape, o.dtype) for o in real]
    given = samples.arguments(op)
    graph = make_fx(call)(*given.values())
    targets = {str(node.target) for node in graph.graph.nodes}
    assert not any("item" in name or "local_scalar" in name for name in targets)


def test_in_eager_code_tables_are_as_long_as_the_longest_sequence() -> None:
    indptr = torch.tensor([0, 2, 2, 7], dtype=torch.int32)
    assert _ragged.longest(indptr, 100) == 5
    assert _ragged.longest(indptr, 3) == 3
    assert _ragged.longest(indptr[:1], 100) == 0
    with FakeTensorMode() as mode:
        assert _ragged.longest(mode.from_tensor(indptr), 100) == 100
    assert _ragged.longest(indptr.to("meta"), 100) == 100
