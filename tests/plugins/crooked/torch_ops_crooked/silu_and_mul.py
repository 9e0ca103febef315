"""Another type of an argument."""

from __future__ import annotations

from torch import Tensor


def silu_and_mul(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.clone()
