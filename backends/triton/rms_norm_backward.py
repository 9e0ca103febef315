"""rms_norm_backward in Triton."""

from torch import Tensor

from ._launch import refuses_bfloat16
from ._norm_gradients import ONE_PLUS, RMS, gradients

__all__ = ["rms_norm_backward", "supports"]


def rms_norm_backward(
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None = None,
    residual_grad: Tensor | None = None,
    eps: float = 1e-6,
    one_plus: bool = False,
) -> tuple[Tensor, Tensor]:
    style = ONE_PLUS if one_plus else RMS
    dx, dweight, _ = gradients(x, grad, residual_grad, weight, None, eps, style)
    return dx, dweight


supports = refuses_bfloat16(rms_norm_backward, 2)
