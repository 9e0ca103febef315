"""layer_norm_backward in Triton."""

from torch import Tensor

from ._launch import refuses_bfloat16
from ._norm_gradients import LAYER, gradients

__all__ = ["layer_norm_backward", "supports"]


def layer_norm_backward(
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    return gradients(x, grad, None, weight, bias, eps, LAYER)


supports = refuses_bfloat16(layer_norm_backward, 2, 3)
