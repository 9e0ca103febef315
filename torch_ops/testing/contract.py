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
    """The bytes behind every tensor argument before a call."""

    stored: Mapping[str, Tensor]

    @classmethod
    def take(cls, args: Arguments) -> Snapshot:
        """Copies the storage of every tensor argument."""
        return cls({n: _bytes(v).clone() for n, v in args.items() if isinstance(v, Tensor)})

    def check(self, args: Arguments, mutates: Sequence[str]) -> None:
        """Checks that nothing changed but the elements of the mutated arguments.

        Raises:
            ViolationError: Another argument changed, or bytes between elements of a mutated one.
        """
        for name, before in self.stored.items():
            now = args[name]
            expected = before
            if name in mutates:
                expected = before.clone()
                typed = torch.empty(0, dtype=now.dtype, device=now.device)
                typed.set_(expected.untyped_storage())
                view = typed.as_strided(now.shape, now.stride(), now.storage_offset())
                view.copy_(now.clone())
            if not torch.equal(expected, _bytes(now)):
                what = "bytes outside its elements" if name in mutates else "an input"
                count = int((expected != _bytes(now)).sum())
                raise ViolationError("contract", f"{name}: {what} changed ({count} bytes)")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def check_metadata(outputs: Sequence[Tensor], expected: Sequence[Output], args: Arguments) -> None:
    """Checks count, shape, dtype, device and contiguity of the outputs.

    Raises:
        ViolationError: One differs from what the oracle says.
    """
    if len(outputs) != len(expected):
        raise ViolationError("contract", f"{len(outputs)} outputs, expected {len(expected)}")
    device = next(v.device for v in args.values() if isinstance(v, Tensor))
    for got, want in zip(outputs, expected, strict=True):
        seen = (tuple(got.shape), got.dtype, got.device)
        needed = (tuple(want.value.shape), want.dtype, device)
        if seen != needed:
            raise ViolationError("contract", f"{want.name}: received {seen}, expected {needed}")


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
