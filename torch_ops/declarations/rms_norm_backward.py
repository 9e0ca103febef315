"""rms_norm_backward: gradients of rms_norm, gemma_rms_norm and both with an added residual."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.contracts import NormGradientContract
from torch_ops.declarations import _norm_gradients
from torch_ops.declarations._shared import upcast
from torch_ops.declare import op


@op(contract=NormGradientContract())
def rms_norm_backward(
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None = None,
    residual_grad: Tensor | None = None,
    eps: float = 1e-6,
    one_plus: bool = False,
) -> tuple[Tensor, Tensor]:
    """Give the gradients of what `rms_norm` normalizes and of its weight from that of its result.

    r = 1 / sqrt(mean(x ** 2, -1) + eps), x_hat = x * r, g = grad * weight
    dx = r * (g - x_hat * mean(g * x_hat, -1)) + residual_grad
    dweight = sum(grad * x_hat) over all rows

    Args:
        x: ``[..., hidden]`` float16, bfloat16, float32 or float64, any strides: what was
            normalized, of an op that adds a residual the stored sum.
        grad: Shape, dtype and device of ``x``, any strides: the gradient of the normalized rows.
        weight: ``[hidden]`` of any of these dtypes; None is a weight of ones.
        residual_grad: As ``grad``, of the stored sum; None is one of zeros.
        eps: Added to the mean of squares, >= 0.
        one_plus: Whether the weight is stored as its difference from one, as in `gemma_rms_norm`.

    Returns:
        ``(dx, dweight)``: ``[..., hidden]``, dtype of ``x``, contiguous, and ``[hidden]``, dtype of
        ``weight``, or ``[0]`` without one. Everything is computed in float32 (float64 for float64
        ``x``) and rounded once.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, or ``eps`` is negative.
        NoBackwardError: an input requires grad.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv 1910.07467).
    """
    wide, upstream = upcast(x), upcast(grad)
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normal, scaled = wide * inverse, upstream
    if weight is not None:
        gain = upcast(weight, x)
        scaled = upstream * (1 + gain if one_plus else gain)
    dx = inverse * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    if residual_grad is not None:
        dx = dx + upcast(residual_grad)
    return dx.to(x.dtype), _norm_gradients.summed(upstream * normal, weight, x)


@rms_norm_backward.check
def _check(
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None = None,
    residual_grad: Tensor | None = None,
    eps: float = 1e-6,
    one_plus: bool = False,
) -> None:
    _norm_gradients.check("rms_norm_backward", x, grad, {"weight": weight}, eps, residual_grad)


@rms_norm_backward.fake
def _fake(
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None = None,
    residual_grad: Tensor | None = None,
    eps: float = 1e-6,
    one_plus: bool = False,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _norm_gradients.empty(weight, x)
