"""`debug`: checks that read data or compare memory, in eager and in compiled code."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import torch_ops
from torch_ops import DeclarationError, binding, ops

from . import samples
from .toy import Toy

BACKENDS = ("torch", "inductor")


def rope(positions: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count = len(positions)
    q, k = torch.randn(count, 2, 8), torch.randn(count, 1, 8)
    return q, k, torch.randn(4, 8), torch.tensor(positions, dtype=torch.int64)


@pytest.mark.parametrize("op", ["apply_rope", "apply_rope_"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([0, 4], r"in the range 0 to 4 \(accepted: 0 to 3, the rows of 'cos_sin_cache'\)"),
        ([-1, 3], r"in the range -1 to 3 \(accepted: 0 to 3"),
    ],
    ids=["high", "low"],
)
def test_positions_out_of_range(op: str, backend: str, positions: list[int], message: str) -> None:
    call = getattr(ops, op)
    args = rope(positions)
    before = [arg.clone() for arg in args]
    full = f"op '{op}': argument 'positions' is {message}"
    with torch_ops.debug(), pytest.raises(ValueError, match=full):
        call(*args, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


def test_good_calls_pass() -> None:
    with torch_ops.debug():
        ops.apply_rope(*rope([0, 3]))
        ops.apply_rope_(*rope([3, 0]))
        ops.apply_rope(*rope([]))
        ops.rms_norm(torch.randn(2, 8))
        assert ops.fused_add_rms_norm_(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8)) is None


def test_it_takes_effect_in_compiled_code_and_compiles_nothing(toy: Toy) -> None:
    toy.serve("torch", 1)
    counter = CompileCounterWithBackend("aot_eager")
    compiled: Callable[[Tensor], Any] = torch.compile(ops.toy, backend=counter, fullgraph=True)
    bad = -torch.ones(2)
    compiled(bad)
    for _ in range(2):
        with torch_ops.debug(), pytest.raises(ValueError, match="argument 'x' has negative elem"):
            compiled(bad)
        with torch_ops.debug():
            compiled(-bad)
        compiled(bad)
    assert counter.frame_count == 1


def test_nesting_and_threads(toy: Toy) -> None:
    toy.serve("torch", 1)
    toy.serve("triton", 3)

    def negative() -> float:
        return float(ops.toy(-torch.ones(1)))

    with torch_ops.debug():
        with torch_ops.debug(False):
            assert negative() == 1
        with torch_ops.use_backend("triton"), pytest.raises(ValueError, match="negative"):
            negative()
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(negative).result() == 1
        assert float(ops.toy(torch.ones(1))) == 1
    assert negative() == 1
    with torch_ops.use_backend("triton"):
        with torch_ops.debug():
            assert float(ops.toy(torch.ones(1))) == 3
        assert negative() == 3


@pytest.mark.parametrize("op", samples.OPS)
def test_results_of_every_op_are_what_its_fake_says(op: str) -> None:
    with torch_ops.debug():
        getattr(ops, op)(*samples.arguments(op).values())


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            lambda x, n: torch.ones(3),
            r"is float32\[3\]@cpu, by the declaration's fake float32\[2",
        ),
        (lambda x, n: x.double(), r"is float64\[2, 3\]@cpu, by the declaration's fake float32\["),
        (lambda x, n: torch.ones(2, 3, device="meta"), r"is float32\[2, 3\]@meta, by the decl"),
        (lambda x, n: torch.ones(2, 3).requires_grad_(), "requires grad, and no input does"),
    ],
    ids=["shape", "dtype", "device", "requires_grad"],
)
def test_results_are_what_compiled_code_is_told(
    kernel: Callable[[Tensor, int], Tensor], message: str, toy: Toy
) -> None:
    toy.serve("torch", 1, kernel=kernel)
    x = torch.ones(2, 3)
    ops.toy(x)
    with torch_ops.debug(), pytest.raises(DeclarationError, match=f"op 'toy': output 0 {message}"):
        ops.toy(x)


@pytest.mark.parametrize(
    ("result", "count", "message"),
    [
        (None, 1, "a kernel returned NoneType (declared: 1 tensors)"),
        (torch.ones(2), 0, "a kernel returned Tensor (declared: no tensors)"),
        ((torch.ones(2),), 2, "a kernel returned a tuple of 1 (declared: 2 tensors)"),
        ([torch.ones(2), 3], 2, "a kernel returned a list of 2 (declared: 2 tensors)"),
    ],
)
def test_results_are_as_many_tensors_as_declared(result: Any, count: int, message: str) -> None:
    with pytest.raises(DeclarationError, match=re.escape(f"op 'toy': {message}")):
        binding._outputs("toy", result, count)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (lambda x, n: x, "output 0 shares memory with an input or another output"),
        (lambda x, n: x[:1], "output 0 shares memory with an input"),
        (lambda x, n: torch.ones(3, 2).t(), r"output 0 has strides \(1, 2\) for shape \[2, 3\]"),
    ],
    ids=["itself", "view", "strides"],
)
def test_outputs_are_fresh_and_contiguous(
    kernel: Callable[[Tensor, int], Tensor], message: str, toy: Toy
) -> None:
    toy.serve("torch", 1, kernel=kernel)
    x = torch.ones(2, 3)
    ops.toy(x)
    with torch_ops.debug(), pytest.raises(DeclarationError, match=f"op 'toy': {message}"):
        ops.toy(x)
