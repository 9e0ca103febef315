"""The gated activations of sgl-kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _library

__all__ = ["DTYPES", "activate"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def activate(operator: str, x: Tensor) -> Tensor:
    """Run one of them into a fresh tensor."""
    *lead, width = x.shape
    out = x.new_empty((*lead, width // 2))
    if out.numel():
        _library.operator(operator)(out, x)
    return out
