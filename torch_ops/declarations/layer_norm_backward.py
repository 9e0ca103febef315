"""layer_norm_backward: gradients of layer_norm."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.contracts import NormGradientContract
from torch_ops.declarations import _norm_gradients
from torch_ops.declarations._shared import upcast
from torch_ops.declare import op


@op(contract=NormGradientContract())
def layer_norm_backward(
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradients of what `layer_norm` takes from that of its result.

    r = 1 / sqrt(mean((x - mean(x)) ** 2) + eps), x_hat = (x - mean(x)) * r, g = grad * weight
    dx = r * (g - mean(g) - x_hat * mean(g * x_hat))
    dweight = sum(grad * x_hat), dbias = sum(grad), over all rows

    Args:
        x: ``[..., hidden]`` float16, bfloat16, float32 or float64, any strides.
        grad: Shape, dtype and device of ``x``, any strides: the gradient of the result.
        weight: ``[hidden]`` of any of these dtypes; None is a weight of ones.
        bias: ``[hidden]`` of any of these dtypes, whose values aren't read; None if there was none.
        eps: Added to the variance, >= 0.

    Returns:
        ``(dx, dweight, dbias)``: ``[..., hidden]``, dtype of ``x``, contiguous, and twice
        ``[hidden]``, dtype of ``weight`` and of ``bias``, or ``[0]`` where there is none.
        Everything is computed in float32 (float64 for float64 ``x``) and rounded once.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, or ``eps`` is negative.
        NoBackwardError: an input requires grad.

    Source: Ba, Kiros and Hinton, Layer Normalization (arXiv 1607.06450).
    """
    wide, upstream = upcast(x), upcast(grad)
    centered = wide - wide.mean(-1, keepdim=True)
    inverse = torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps)
    normal = centered * inverse
    scaled = upstream if weight is None else upstream * upcast(weight, x)
    slope = (scaled * normal).mean(-1, keepdim=True)
    dx = inverse * (scaled - scaled.mean(-1, keepdim=True) - normal * slope)
    dweight = _norm_gradients.summed(upstream * normal, weight, x)
    return dx.to(x.dtype), dweight, _norm_gradients.summed(upstream, bias, x)


@layer_norm_backward.check
def _check(
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> None:
    vectors = {"weight": weight, "bias": bias}
    _norm_gradients.check("layer_norm_backward", x, grad, vectors, eps)


@layer_norm_backward.fake
def _fake(
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    empty = _norm_gradients.empty
    return x.new_empty(x.shape), empty(weight, x), empty(bias, x)
