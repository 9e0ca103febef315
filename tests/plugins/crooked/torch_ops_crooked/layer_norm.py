"""Another order of arguments."""

from __future__ import annotations

from torch import Tensor


def layer_norm(
    x: Tensor, bias: Tensor | None = None, weight: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    return x.clone()
