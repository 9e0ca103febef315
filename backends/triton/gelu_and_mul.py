"""gelu_and_mul in Triton."""

from torch import Tensor

from ._gates import GELU, gated
from ._launch import refuses_bfloat16

__all__ = ["gelu_and_mul", "supports"]


def gelu_and_mul(x: Tensor) -> Tensor:
    return gated(x, GELU)


supports = refuses_bfloat16(gelu_and_mul)
