"""rms_norm; compiled for each dtype."""

from __future__ import annotations

from torch import Tensor

import torch_ops_late
from torch_ops.declarations.rms_norm import rms_norm as _declaration


def supports(x: Tensor, weight: Tensor | None, eps: float) -> str | None:
    return None if x.dim() == 2 else f"x of rank {x.dim()} (supported: 2)"


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    torch_ops_late.module(f"norm for {x.dtype}")()
    result: Tensor = _declaration.reference(x, weight, eps)
    return result
