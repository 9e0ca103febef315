"""gelu_and_mul_backward in Triton."""

from torch import Tensor

from ._gate_gradients import GELU, gradient
from ._launch import refuses_bfloat16

__all__ = ["gelu_and_mul_backward", "supports"]


def gelu_and_mul_backward(x: Tensor, grad: Tensor) -> Tensor:
    return gradient(x, grad, GELU)


supports = refuses_bfloat16(gelu_and_mul_backward)
