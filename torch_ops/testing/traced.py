"""What compilers see of a backend's operator: its fake kernel, its tracing, its compiled calls.

The comparison with the fake kernel is our own: `torch.library.opcheck` ignored the strides of CPU
tensors before PyTorch 2.13 (pytorch#177115).
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_ops.testing.arguments import build, contiguous
from torch_ops.testing.arithmetic import bits_equal
from torch_ops.testing.compare import ViolationError, check_outputs
from torch_ops.testing.proof import Proof
from torch_ops.testing.spec import Operand, Spec
from torch_ops.testing.subject import Subject, call
from torch_ops.testing.values import REGIMES

_NARROW = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


def opcheck(op: str, backend: str, args: dict[str, Any], tests: Sequence[str]) -> None:
    """Runs tests of `torch.library.opcheck` on the op's backend overload.

    Raises:
        ViolationError: Schema, fake kernel or tracing disagree with what the kernel does.
    """
    overload = getattr(torch.ops.torch_ops, op).backend
    if any(isinstance(a, Tensor) and a.dtype in _NARROW for a in args.values()):
        # Its look at what was written multiplies, which PyTorch can't with float8. The kit's own
        # looks at bytes.
        tests = [name for name in tests if name != "test_schema"]
    values = tuple(a.detach() if isinstance(a, Tensor) else a for a in args.values())
    outcome = torch.library.opcheck(
        overload, (*values, backend), test_utils=tests, raise_exception=False
    )
    wrong = {name: str(seen) for name, seen in outcome.items() if seen != "SUCCESS"}
    if wrong:
        raise ViolationError("opcheck", "; ".join(f"{n}: {t}" for n, t in wrong.items()))


def check_fake(op: str, backend: str, args: dict[str, Any]) -> None:
    """Compares dtype, device, shape and strides of the fake kernel's outputs with the kernel's.

    A mutating op has no outputs: its schema says all.

    Raises:
        ViolationError: They differ.
    """
    overload = getattr(torch.ops.torch_ops, op).backend
    if overload._schema.is_mutable:
        return
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args.values()]
        fake = overload(*fakes, backend)
    real = overload(*args.values(), backend)
    pairs = zip(_outputs(real), _outputs(fake), strict=True)
    for index, (got, said) in enumerate(pairs):
        if _looks(got) != _looks(said):
            detail = f"output {index}: {_looks(got)}, by the fake kernel {_looks(said)}"
            raise ViolationError("opcheck", detail)


def _outputs(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _looks(x: Tensor) -> dict[str, Any]:
    """What a compiler relies on; the stride of an axis of one element says nothing."""
    strides = [s if n > 1 and x.numel() else None for n, s in zip(x.shape, x.stride(), strict=True)]
    return {"dtype": x.dtype, "device": x.device, "shape": [*x.shape], "strides": strides}


def tame(spec: Spec) -> Spec:
    """The same call with values that give no NaN, which opcheck takes for a difference."""

    def calm(operand: Operand) -> Operand:
        if operand.regime not in REGIMES:
            return operand
        return dataclasses.replace(operand, regime="normal", specials=())

    return spec.replace(operands={name: calm(operand) for name, operand in spec.operands})


def check_compiled(
    subject: Subject, proof: Proof, contract: Any, device: torch.device, spec: Spec
) -> None:
    """Calls the kernel in a graph of its own; it is inside the bound and, if deterministic, equal.

    Raises:
        ViolationError: The graph breaks, or its outputs are others than those of an eager call.
    """
    graph = dataclasses.replace(subject, call=_compile(subject))
    try:
        outputs = call(graph, proof, build(spec, device))
        check_outputs(outputs, proof.oracle(contiguous(build(spec)), contract))
    except ViolationError as broken:
        raise ViolationError("compiled", broken.detail) from broken
    if not contract.deterministic:
        return
    eager = call(subject, proof, build(spec, device))
    for index, (got, other) in enumerate(zip(outputs, eager, strict=True)):
        different = int((~bits_equal(got, other)).sum())
        if different:
            detail = f"output {index}: {different} elements differ from those of the eager call"
            raise ViolationError("compiled", detail)


def _compile(subject: Subject) -> Any:
    """A function with code of its own: Dynamo counts recompiles, up to a limit, by code object."""
    kernel = inspect.unwrap(subject.call)  # what a process of its own tells others isn't traced

    def graph(*args: Any) -> Any:
        return kernel(*args)

    code = graph.__code__.replace(co_name=f"{subject.name}_graph")
    alone = types.FunctionType(code, graph.__globals__, None, None, graph.__closure__)
    return torch.compile(alone, fullgraph=True, backend="aot_eager")
