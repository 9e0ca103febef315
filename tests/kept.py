"""What autograd keeps of a call for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["bytes_kept", "kept"]


def kept(call: Callable[..., object], *args: Any) -> list[Tensor]:
    """The tensors that are kept, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call(*args)
    return found


def bytes_kept(call: Callable[..., object], *args: Any) -> dict[int, int]:
    """Bytes of the storages that are kept, by address."""
    storages = [tensor.untyped_storage() for tensor in kept(call, *args)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
