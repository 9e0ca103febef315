"""What is under test: a registered backend of an op, or any callable with the op's signature."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from torch_ops.contracts import PROMISES
from torch_ops.errors import TorchOpsError
from torch_ops.once import shortened
from torch_ops.testing.compare import DeviceLostError, ViolationError
from torch_ops.testing.proof import Arguments, Proof

T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """A kernel under test.

    Attributes:
        name: The backend's name, or the callable's.
        call: Takes the op's arguments by position.
        refuses: None, or why the kernel can't serve these arguments. Asked before the call.
        untestable: None, or why results for a dtype say nothing on this machine.
        registered: Whether `name` is a backend of the op, so that opcheck can reach it.
        promises: What the kernel says of `torch_ops.contracts.PROMISES`, over the op's contract.
    """

    name: str
    call: Callable[..., Any]
    refuses: Callable[[Sequence[Any]], str | None]
    untestable: Callable[[torch.dtype], str | None]
    registered: bool
    promises: Mapping[str, bool] = field(default_factory=dict)

    def under(self, contract: Any) -> Any:
        """The contract that the kernel has to keep."""
        return replace(contract, **self.promises)


def _never(_: object) -> None:
    return None


def subject_of(function: Callable[..., Any], name: str | None = None) -> Subject:
    """Makes a subject of a plain callable.

    Its optional attribute `supports` is asked first, `deterministic` and `batch_invariant` (bools)
    are what it promises.
    """
    supports = getattr(function, "supports", None)
    refuses = _never if supports is None else lambda args: _reason(asked(supports, *args))
    label = name or str(getattr(function, "__name__", type(function).__name__))
    stated = {promise: getattr(function, promise, None) for promise in PROMISES}
    promises = {promise: value for promise, value in stated.items() if value is not None}
    for promise, value in promises.items():
        if not isinstance(value, bool):
            msg = f"{label}.{promise}: received {value!r}, accepted a bool"
            raise TypeError(msg)
    return Subject(label, function, refuses, _never, registered=False, promises=promises)


def asked(predicate: Callable[..., T], *args: Any) -> T:
    """Asks a predicate.

    Raises:
        ViolationError: It raised something else than an error of ours.
    """
    try:
        return predicate(*args)
    except TorchOpsError:
        raise  # what is said of its answer
    except (Exception, SystemExit) as error:
        raise ViolationError("contract", f"supports() raised {first_line(error)}") from error


def _reason(answer: object) -> str | None:
    if answer is None or (isinstance(answer, str) and answer):
        return answer
    msg = f"supports: received {answer!r}, accepted None or a reason (str)"
    raise TypeError(msg)


def poison(device: torch.device, sizes: Sequence[int]) -> None:
    """Leaves freed blocks full of NaN bytes for the kernel's own allocations to find."""
    blocks = [torch.full((max(n, 1),), 0xFF, dtype=torch.uint8, device=device) for n in sizes]
    blocks += [block.clone() for block in blocks]
    del blocks


def first_line(error: BaseException) -> str:
    """Gives the type of an error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def call(subject: Subject, proof: Proof, args: Arguments) -> tuple[Tensor, ...]:
    """Runs the kernel and returns its outputs; for a mutating op, the arguments that it writes.

    Raises:
        ViolationError: The kernel raised, or returned something that is no output.
        DeviceLostError: The kernel left the GPU's context unusable.
    """
    tensors = [value for value in args.values() if isinstance(value, Tensor)]
    device = tensors[0].device
    poison(device, [t.numel() * t.element_size() for t in tensors])
    try:
        result = subject.call(*args.values())
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what broke is this call's, and not a later one's
    except torch.AcceleratorError as error:
        raise DeviceLostError(f"supports() accepted the call: {first_line(error)}") from error
    except (Exception, SystemExit) as error:
        detail = f"supports() accepted the call, which raised {type(error).__name__}: "
        detail += shortened(str(error))
        raise ViolationError("contract", detail) from error
    if proof.mutates:
        if result is not None:
            detail = f"a mutating op returns None, received {type(result).__name__}"
            raise ViolationError("contract", detail)
        return tuple(args[name] for name in proof.mutates)
    outputs = (result,) if isinstance(result, Tensor) else result
    if not isinstance(outputs, tuple) or not all(isinstance(o, Tensor) for o in outputs):
        raise ViolationError("contract", f"returned {type(result).__name__}, accepted Tensors")
    return outputs


def mutating(function: Callable[..., Any], proof: Proof) -> Callable[..., None]:
    """Turns a functional kernel into one that writes its outputs into the mutated arguments."""
    places = [proof.arguments.index(name) for name in proof.mutates]

    @functools.wraps(function)
    def in_place(*args: Any) -> None:
        result = function(*args)
        outputs = (result,) if isinstance(result, Tensor) else result
        for place, output in zip(places, outputs, strict=True):
            args[place].copy_(output)

    return in_place
