"""gelu_tanh_and_mul in Triton."""

from torch import Tensor

from ._gates import GELU_TANH, gated
from ._launch import refuses_bfloat16

__all__ = ["gelu_tanh_and_mul", "supports"]


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    return gated(x, GELU_TANH)


supports = refuses_bfloat16(gelu_tanh_and_mul)
