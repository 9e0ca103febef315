"""What scenarios of catalogue rows call: one backend's kernels, or wrong ones, on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_ops.declarations import catalogue
from torch_ops.registry import registry
from torch_ops.testing import layouts, proof_of
from torch_ops.testing.arguments import contiguous, to_device
from torch_ops.testing.compare import ViolationError, check_outputs, check_pairs
from torch_ops.testing.proof import Pair
from torch_ops.testing.registered import registered
from torch_ops.testing.subject import Subject, call, mutating, subject_of

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
INF = float("inf")
Outputs = tuple[Tensor, ...]


class RefusedError(Exception):
    """The kernel's own predicate refuses the call: a right outcome, and the end of a scenario."""


@dataclass(frozen=True)
class Kernels:
    """Kernels of all ops on one device.

    Attributes:
        subject: Gives the kernel of an op.
        device: Where tensors go.
        far: Elements that large tensors have at least; where memory is short, as few as an
            index of 12 bits holds.
    """

    subject: Callable[[str], Subject]
    device: torch.device
    far: int = 2**12

    def __call__(self, op: str, *args: Any) -> Outputs:
        """Run an op; for one that mutates, on copies of what it writes.

        Raises:
            RefusedError: The kernel refuses these arguments.
        """
        subject, proof = self.accepting(op, *args), proof_of(op)
        given = {
            name: to_device(_whole_copy(value), self.device) if name in proof.mutates else value
            for name, value in _bound(op, args).items()
        }
        return call(subject, proof, given)

    def accepting(self, op: str, *args: Any) -> Subject:
        """Give an op's kernel, which takes these arguments.

        Raises:
            RefusedError: It refuses them.
        """
        subject = self.subject(op)
        reason = subject.refuses(tuple(_bound(op, args).values()))
        if reason is not None:
            raise RefusedError(reason)
        return subject

    def takes(self, op: str, *args: Any) -> Outputs | None:
        """Run an op, or give None where the kernel refuses these arguments."""
        try:
            return self(op, *args)
        except RefusedError:
            return None

    def proven(self, op: str, *args: Any) -> Outputs:
        """Run an op and judge what it gives by the oracle's bound."""
        found = self(op, *args)
        judge(op, args, found)
        return found

    def normal(self, *shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
        """The same numbers on every device."""
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return drawn.to(dtype).to(self.device)

    def full(self, shape: Sequence[int], value: float, dtype: torch.dtype = FP32) -> Tensor:
        """One number everywhere."""
        return torch.full(tuple(shape), value, dtype=dtype, device=self.device)

    def place(self, values: Tensor, layout: str) -> Tensor:
        """Lay values out in memory; what is between them is NaN."""
        return to_device(layouts.place(values.cpu().contiguous(), layout), self.device)


def _bound(op: str, args: Sequence[Any]) -> dict[str, Any]:
    bound = catalogue()[op].signature.bind(*args)
    bound.apply_defaults()
    return bound.arguments


def _whole_copy(value: Tensor) -> Tensor:
    """Copy a tensor with its storage, so that its strides stay."""
    storage = torch.empty(0, dtype=value.dtype, device=value.device)
    storage = storage.set_(value.untyped_storage()).clone()
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())


def judge(op: str, args: Sequence[Any], found: Sequence[Tensor]) -> None:
    """Compare outputs with the oracle.

    Raises:
        ViolationError: An element is outside its bound.
    """
    host = {n: v.cpu() if isinstance(v, Tensor) else v for n, v in _bound(op, args).items()}
    expected = proof_of(op).oracle(contiguous(host), catalogue()[op].contract)
    check_outputs(found, expected)


def same(what: str, found: Tensor | Sequence[Tensor], wanted: Tensor | Sequence[Tensor]) -> None:
    """Compare bit for bit.

    Raises:
        ViolationError: An element differs.
    """
    a = (found,) if isinstance(found, Tensor) else tuple(found)
    b = (wanted,) if isinstance(wanted, Tensor) else tuple(wanted)
    check_pairs(what, [Pair(f"output {i}", *pair) for i, pair in enumerate(zip(a, b, strict=True))])


def require(what: str, holds: object) -> None:
    """Refuse what doesn't hold.

    Raises:
        ViolationError: It doesn't.
    """
    if not bool(holds):
        raise ViolationError("row", what)


def of_backend(backend: str, device: torch.device, far: int = 2**12) -> Kernels:
    """The registered kernels of a backend, called through the dispatcher."""
    return Kernels(lambda op: registered(op, backend), device, far)


def backends_of(op: str) -> list[str]:
    """Names of the backends that are registered for an op."""
    return [spec.backend.value for spec in registry.get(op)]


def of_function(op: str, function: Callable[..., Any]) -> Kernels:
    """A function in place of one op's kernel on the CPU; other ops have the reference."""
    proof = proof_of(op)
    made = mutating(function, proof) if proof.mutates else function

    def subject(name: str) -> Subject:
        return subject_of(made) if name == op else registered(name, "torch")

    return Kernels(subject, torch.device("cpu"))
