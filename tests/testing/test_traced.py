"""What compilers see of an operator: each check finds a kernel that lies about it."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops
from torch_ops.declarations import catalogue
from torch_ops.testing import build, proof_of, traced
from torch_ops.testing.compare import ViolationError
from torch_ops.testing.examine import Examiner
from torch_ops.testing.registered import registered
from torch_ops.testing.search import covering_rows
from torch_ops.testing.subject import Subject, subject_of
from torch_ops.testing.verify import verify

OP, BACKEND, CPU = "silu_and_mul", "aiter", torch.device("cpu")
SPEC = next(s for s in covering_rows(OP) if s.dim["half"] > 1 and len(s.dims) > 1)
SPEC = traced.tame(SPEC)
CONTRACT = catalogue()[OP].contract
Kernel = Callable[[Tensor], Tensor]
reference: Kernel = catalogue()[OP].reference


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kernel], None]:
    """Makes a function the kernel of a backend that can't run here."""

    def put(kernel: Kernel) -> None:
        module = types.ModuleType("lying_kernels")
        module.kernel = kernel  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "lying_kernels", module)
        torch_ops.registry.unregister(torch_ops.registry.find(OP, BACKEND))
        torch_ops.register_kernel(torch_ops.KernelSpec(OP, BACKEND, "lying_kernels:kernel"))

    return put


def _compiled(kernel: Kernel, **promises: Any) -> None:
    subject: Subject = subject_of(kernel)
    contract = dataclasses.replace(CONTRACT, **promises)
    traced.check_compiled(subject, proof_of(OP), contract, CPU, SPEC)


def test_strides_other_than_those_of_the_fake_kernel_are_found(
    install: Callable[[Kernel], None],
) -> None:
    def strided(x: Tensor) -> Tensor:
        out = reference(x)
        return torch.stack([out, out], dim=-1)[..., 0]

    install(strided)
    with pytest.raises(ViolationError, match=r"\[opcheck\] output 0: .*, by the fake kernel "):
        traced.check_fake(OP, BACKEND, build(SPEC))
    traced.check_fake(OP, "torch", build(SPEC))


def test_tracing_that_gives_other_values_is_found(install: Callable[[Kernel], None]) -> None:
    calls = itertools.count()
    install(lambda x: reference(x) + next(calls))
    with pytest.raises(ViolationError, match="test_aot_dispatch_dynamic: Outputs of the operator"):
        traced.opcheck(OP, BACKEND, build(SPEC), ("test_aot_dispatch_dynamic",))
    traced.opcheck(OP, "torch", build(SPEC), ("test_aot_dispatch_dynamic",))


def test_a_graph_break_is_found() -> None:
    def breaking(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return reference(x)

    with pytest.raises(ViolationError, match=r"(?s)\[compiled\] .* raised Unsupported"):
        _compiled(breaking)
    _compiled(reference)


def test_a_compiled_call_is_inside_the_bound() -> None:
    def other(x: Tensor) -> Tensor:
        return reference(x) + 1 if torch.compiler.is_compiling() else reference(x)

    with pytest.raises(ViolationError, match=r"\[compiled\] out: error is"):
        _compiled(other)


def test_a_deterministic_kernel_gives_the_same_bits_in_a_graph() -> None:
    def other(x: Tensor) -> Tensor:
        out = reference(x)
        return torch.nextafter(out, 2 * out) if torch.compiler.is_compiling() else out

    with pytest.raises(ViolationError, match=r"\[compiled\] output 0: \d+ elements differ from"):
        _compiled(other)
    _compiled(other, deterministic=False)


def test_many_graphs_don_t_meet_the_limit_of_recompiles() -> None:
    limit = torch._dynamo.config.recompile_limit
    rows = itertools.cycle(covering_rows(OP))
    for spec in itertools.islice(rows, limit + 2):
        traced.check_compiled(subject_of(reference), proof_of(OP), CONTRACT, CPU, spec)


def test_a_kernel_that_exits_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaves(*_: object) -> None:
        sys.exit(0)

    monkeypatch.setattr(traced, "check_fake", leaves)
    examine = Examiner(registered(OP, "torch"), proof_of(OP), CONTRACT)
    for check in ("opcheck", "traced"):
        with pytest.raises(ViolationError, match="SystemExit: 0") as seen:
            examine.operator(SPEC, check)
        assert (seen.value.layer, seen.value.spec) == (check, SPEC.to_json())


@pytest.mark.parametrize(
    ("check", "phases"),
    [("check_fake", ["opcheck", "traced"]), ("check_compiled", ["compiled"])],
)
def test_a_verification_runs_every_check(
    monkeypatch: pytest.MonkeyPatch, check: str, phases: list[str]
) -> None:
    def broken(*_: object) -> None:
        raise ViolationError("opcheck", "planted")

    monkeypatch.setattr(traced, check, broken)
    result = verify(OP, "torch", dtypes=("float16",))
    assert [f.phase for f in result.failures] == phases
    for failure in result.failures:
        shell, option, code = shlex.split(failure.again)
        assert (shell, option) == ("python", "-c")
        with pytest.raises(ViolationError, match="planted"):
            exec(code, {})
    assert result.failures[0].spec
