"""What a call must leave alone beside its arguments: memory nearby, and the device itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_ops.testing.compare import DeviceLostError, ViolationError

BYTE = 0xA5
GUARD = 512  # bytes: the step in which CUDA's caching allocator hands out memory
_PROBED = 64


@dataclass(frozen=True)
class Guards:
    """Blocks of known bytes with holes of the outputs' sizes between them.

    The holes are free when the kernel allocates, and allocators fill a hole that fits: what is
    written past an output's end, or before its start, is then in a guard.
    """

    blocks: tuple[Tensor, ...]

    @classmethod
    def place(cls, sizes: Sequence[int], device: torch.device) -> Guards:
        """Allocates the guards, with two holes for each size in bytes."""
        blocks, holes = [_guard(device)], []
        for size in (*sizes, *sizes):
            holes.append(torch.empty(max(size, 1), dtype=torch.uint8, device=device))
            blocks.append(_guard(device))
        del holes
        return cls(tuple(blocks))

    def check(self) -> None:
        """Checks every byte.

        Raises:
            ViolationError: Some changed.
        """
        changed = int((torch.cat(self.blocks) != BYTE).sum())
        if changed:
            detail = f"memory beside the outputs changed ({changed} bytes)"
            raise ViolationError("contract", detail)


def _guard(device: torch.device) -> Tensor:
    return torch.full((GUARD,), BYTE, dtype=torch.uint8, device=device)


def probe(device: torch.device, before: str = "") -> None:
    """Checks that the device still serves, by a sum that is known: 0 + 1 + 4 + ... + 63^2.

    Args:
        device: The device.
        before: What was seen before, for the message.

    Raises:
        DeviceLostError: It serves no more.
        ViolationError: The sum is wrong.
    """
    after = f"{before}; then " if before else ""
    try:
        found = int(torch.arange(_PROBED, device=device).square().sum())
    except RuntimeError as error:  # torch.AcceleratorError is one
        first = str(error).partition("\n")[0]
        raise DeviceLostError(f"{after}a probe raised {type(error).__name__}: {first}") from error
    known = (_PROBED - 1) * _PROBED * (2 * _PROBED - 1) // 6
    if found != known:
        raise ViolationError("contract", f"{after}a probe of the device: {found} is not {known}")
