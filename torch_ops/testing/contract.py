"""Layer 0: shape, dtype, device, strides, fresh memory, and inputs left alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_ops.testing.compare import ViolationError
from torch_ops.testing.proof import Arguments, Output


def _bytes(tensor: Tensor) -> Tensor:
    """Every byte of the storage behind a tensor, gaps included."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


@dataclass(frozen=True)
class Snapshot:
    """The bytes behind every tensor argument before a call, where, and how it looked at them."""

    stored: Mapping[str, Tensor]
    looks: Mapping[str, tuple[object, ...]]
    places: Mapping[str, tuple[int, int]]

    @classmethod
    def take(cls, args: Arguments) -> Snapshot:
        """Copies the storage of every tensor argument."""
        tensors = {n: v for n, v in args.items() if isinstance(v, Tensor)}
        stored = {n: _bytes(v).clone() for n, v in tensors.items()}
        looks = {n: _look(v) for n, v in tensors.items()}
        return cls(stored, looks, {n: _place(v) for n, v in tensors.items()})

    def check(self, args: Arguments, mutates: Sequence[str]) -> None:
        """Checks that nothing changed but the elements of the mutated arguments.

        Raises:
            ViolationError: Another argument changed, bytes between elements of a mutated one, or
                what any of them is: shape, strides, offset, dtype, requires_grad.
        """
        for name, before in self.stored.items():
            now = args[name]
            if _look(now) != self.looks[name]:
                detail = f"{name}: an input is {_look(now)} now, was {self.looks[name]}"
                raise ViolationError("contract", f"{detail} (shape, strides, offset, dtype, grad)")
            if _place(now) != self.places[name]:
                raise ViolationError("contract", f"{name}: an input lies in other memory now")
            if torch.equal(before, _bytes(now)):
                continue
            changed = before != _bytes(now)
            count, outside = int(changed.sum()), int((changed & ~_elements(now)).sum())
            if name not in mutates:
                seen = f"an input changed ({count} bytes"
                seen += f", {outside} of them outside its elements)" if outside else ")"
                raise ViolationError("contract", f"{name}: {seen}")
            if outside:
                detail = f"{name}: bytes outside its elements changed ({outside} bytes)"
                raise ViolationError("contract", detail)


def _elements(tensor: Tensor) -> Tensor:
    """Which bytes of the storage behind a tensor are its elements'."""
    inside, size = torch.zeros_like(_bytes(tensor), dtype=torch.bool), tensor.element_size()
    strides = (*(stride * size for stride in tensor.stride()), 1)
    inside.as_strided((*tensor.shape, size), strides, tensor.storage_offset() * size).fill_(True)
    return inside


def _look(tensor: Tensor) -> tuple[object, ...]:
    return (
        tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype,
        tensor.requires_grad,
    )  # fmt: skip


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(tensor: Tensor) -> tuple[int, int]:
    return _storage(tensor), tensor.untyped_storage().nbytes()


def check_metadata(outputs: Sequence[Tensor], expected: Sequence[Output], args: Arguments) -> None:
    """Checks count, type, shape, dtype and device of the outputs, and that they are plain.

    Raises:
        ViolationError: One differs from what the oracle says.
    """
    if len(outputs) != len(expected):
        raise ViolationError("contract", f"{len(outputs)} outputs, expected {len(expected)}")
    device = next(v.device for v in args.values() if isinstance(v, Tensor))
    for got, want in zip(outputs, expected, strict=True):
        if type(got) is not Tensor:
            detail = f"received a {type(got).__name__}, expected a torch.Tensor of no subclass"
            raise ViolationError("contract", f"{want.name}: {detail}")
        seen = (tuple(got.shape), got.dtype, got.device)
        needed = (tuple(want.value.shape), want.dtype, device)
        if seen != needed:
            raise ViolationError("contract", f"{want.name}: received {seen}, expected {needed}")
        if got.requires_grad:
            raise ViolationError("contract", f"{want.name}: requires grad, and none of the inputs")
        if got.is_inference() and not torch.is_inference_mode_enabled():
            detail = "made in inference mode, outside of which it was called"
            raise ViolationError("contract", f"{want.name}: {detail}")
        if got.is_neg() or got.is_conj():
            raise ViolationError("contract", f"{want.name}: its memory holds other values (lazy)")


def check_fresh(outputs: Sequence[Tensor], args: Arguments, earlier: Sequence[Tensor]) -> None:
    """Checks that outputs are contiguous and share memory with nothing else.

    Args:
        outputs: What the kernel returned.
        args: Its arguments.
        earlier: Outputs of an earlier call that are still alive.

    Raises:
        ViolationError: An output is strided, or shares its storage.
    """
    owners = {_storage(v): f"input {n}" for n, v in args.items() if isinstance(v, Tensor)}
    owners |= {_storage(t): "an output of an earlier call" for t in earlier}
    for index, output in enumerate(outputs):
        if not output.is_contiguous():
            detail = f"output {index} is not contiguous: shape {tuple(output.shape)}"
            raise ViolationError("contract", f"{detail}, strides {output.stride()}")
        owner = owners.get(_storage(output)) if output.untyped_storage().nbytes() else None
        if owner is not None:
            raise ViolationError("contract", f"output {index} shares memory with {owner}")
        owners[_storage(output)] = f"output {index}"
