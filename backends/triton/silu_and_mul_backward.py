"""silu_and_mul_backward in Triton."""

from torch import Tensor

from ._gate_gradients import SILU, gradient
from ._launch import refuses_bfloat16

__all__ = ["silu_and_mul_backward", "supports"]


def silu_and_mul_backward(x: Tensor, grad: Tensor) -> Tensor:
    return gradient(x, grad, SILU)


supports = refuses_bfloat16(silu_and_mul_backward)
