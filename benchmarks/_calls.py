"""The calls that are measured, by name, and who can run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_ops
from benchmarks import _measure
from torch_ops import kernels, selector
from torch_ops.declarations import catalogue
from torch_ops.platform import Platform
from torch_ops.testing.arguments import filler, make, parameter, to_device
from torch_ops.testing.proof import Arguments, proof_of
from torch_ops.testing.spec import Spec

EAGER, SELECTED = "eager", "selected"
BACKENDS = ("torch", "inductor", "triton", "sgl_kernel", "flashinfer")


@dataclass(frozen=True)
class Job:
    """One named Spec of an op.

    Attributes:
        op: The op.
        dtype: Of its first operand.
        name: The Spec's name, as ``16384x8192``.
        spec: What the arguments are made from.
    """

    op: str
    dtype: str
    name: str
    spec: Spec

    def __str__(self) -> str:
        return f"{self.op} {self.name} {self.dtype}"


@dataclass(frozen=True)
class Candidate:
    """Somebody who can run a call, or why not.

    Attributes:
        name: ``eager``, a backend or ``selected``.
        call: Takes the op's arguments by position; None where it can't run.
        reason: Why it can't.
    """

    name: str
    call: Callable[..., Any] | None
    reason: str = ""


@dataclass(frozen=True)
class Share:
    """Calls of one backend, for one process to compile.

    Attributes:
        backend: Its name.
        specs: Of one op and dtype.
    """

    backend: str
    specs: tuple[Spec, ...]

    def __str__(self) -> str:
        return f"{self.backend} {self.specs[0].op} {self.specs[0].operands[0][1].dtype}"


def named(op: str, dtype: str) -> Mapping[str, Spec]:
    """Give the named Specs of an op."""
    return proof_of(op).named(dtype)


def names_of(op: str) -> list[str]:
    """Name the candidates of an op: the reference, all registered backends, the op itself."""
    registered = {spec.backend.value for spec in torch_ops.registry.get(op)}
    known = [name for name in BACKENDS if name in registered]
    return [EAGER, *known, *sorted(registered.difference(known)), SELECTED]


def candidates(op: str, args: Arguments, device: torch.device) -> list[Candidate]:
    """Ask every candidate whether it takes a call.

    ``eager`` is the op's reference, run by PyTorch as it is written; a backend is its kernel's
    own function, without dispatcher and checks; ``selected`` is the operator itself.
    """
    platform, values = Platform.detect(device), tuple(args.values())
    found = []
    for name in names_of(op):
        if name in (EAGER, SELECTED):
            call = catalogue()[op].reference if name == EAGER else getattr(torch.ops.torch_ops, op)
            found.append(Candidate(name, call))
            continue
        spec = torch_ops.registry.find(op, name)
        verdict = selector.judge(spec, platform, values)
        if verdict.usable:
            found.append(Candidate(name, kernel_of(op, name)))
        else:
            found.append(Candidate(name, None, "; ".join(verdict.reasons)))
    return found


def kernel_of(op: str, backend: str) -> Callable[..., Any]:
    """Give a backend's own function, which an operator calls below its checks."""
    return kernels.load(torch_ops.registry.find(op, backend)).function


class Maker:
    """Makes the arguments of calls, as `torch_ops.testing.arguments.build` does, and keeps tensors.

    A large one takes the host seconds; the calls of other ops have the same.

    Attributes:
        device: Where the tensors go.
        limit: Bytes to keep; past it all of them are let go.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self.device, self.limit = device, limit
        self._kept: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, spec: Spec) -> Arguments:
        """Make a call's arguments; nobody may write to them."""
        return _arguments(spec, self._tensor)

    def _tensor(self, spec: Spec, name: str, shape: tuple[int, ...]) -> Tensor:
        operand, key = spec.operand[name], f"{spec.seed}/{name}"
        fill = filler(proof_of(spec.op), spec, name)
        known = operand, shape, key, None if fill is None else spec.dims
        tensor = self._kept.get(known)
        if tensor is None:
            tensor = to_device(make(operand, shape, key, fill), self.device)
            held = sum(t.untyped_storage().nbytes() for t in (tensor, *self._kept.values()))
            if held > self.limit:
                self._kept.clear()
            else:
                self._kept[known] = tensor
        return tensor


def on_meta(spec: Spec) -> Arguments:
    """Make a call's arguments without data: enough to count its work."""

    def empty(spec: Spec, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, spec.operand[name].dtype), device="meta")

    return _arguments(spec, empty)


def _arguments(spec: Spec, tensor: Callable[[Spec, str, tuple[int, ...]], Tensor]) -> Arguments:
    proof, operands, params = proof_of(spec.op), spec.operand, spec.param
    shapes, found = proof.shapes(spec), dict[str, Any]()
    for name in proof.arguments:
        if name in operands:
            found[name] = tensor(spec, name, shapes[name])
        else:
            found[name] = parameter(params.get(name))
    return found


def copied(args: Arguments, names: Sequence[str]) -> Arguments:
    """Give the arguments with copies of the named tensors, gaps between elements included."""
    return {n: _copy(a) if n in names and isinstance(a, Tensor) else a for n, a in args.items()}


def _copy(tensor: Tensor) -> Tensor:
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    flat = flat.set_(tensor.untyped_storage()).clone()
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def run_once(share: Share) -> None:
    """Run a backend on calls without content, where it takes them, so that it is compiled."""
    device = _measure.device_here()
    for spec in share.specs:
        args = {
            name: torch.zeros_like(a, device=device) if isinstance(a, Tensor) else a
            for name, a in on_meta(spec).items()
        }
        for candidate in candidates(spec.op, args, device):
            if candidate.name == share.backend and candidate.call is not None:
                with torch.no_grad():
                    candidate.call(*args.values())
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
