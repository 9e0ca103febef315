"""silu_and_mul in Triton."""

from torch import Tensor

from ._gates import SILU, gated
from ._launch import refuses_bfloat16

__all__ = ["silu_and_mul", "supports"]


def silu_and_mul(x: Tensor) -> Tensor:
    return gated(x, SILU)


supports = refuses_bfloat16(silu_and_mul)
