"""Another default."""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return x.clone()
