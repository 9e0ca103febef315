"""gelu_and_mul_backward: the gradient of gelu_and_mul."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_ops.contracts import GateContract
from torch_ops.declarations import _gates
from torch_ops.declare import op


@op(contract=GateContract(activation="gelu_erf", rounding="once"))
def gelu_and_mul_backward(x: Tensor, grad: Tensor) -> Tensor:
    """Give the gradient of the input of `gelu_and_mul` from that of its result.

    dgate = grad * value * (P + gate * p), dvalue = grad * gate * P; P and p are the normal
    distribution's integral and density at the gate.

    Args:
        x: ``[..., 2d]`` float16, bfloat16, float32 or float64, any strides; the gate first.
        grad: ``[..., d]``, dtype and device of ``x``, any strides: the gradient of the result.

    Returns:
        ``[..., 2d]``, dtype of ``x``, contiguous. Everything is computed in float32 (float64 for
        float64 input) and rounded once.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: the last dimension is odd, or shapes or devices disagree.
        NoBackwardError: an input requires grad.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units (arXiv 1606.08415).
    """
    gate, _ = _gates.split(x)
    below = 0.5 * torch.special.erfc(-gate / math.sqrt(2))
    density = torch.exp(-0.5 * gate * gate) / math.sqrt(2 * math.pi)
    return _gates.gradient(grad, x, gate * below, below + gate * density)


gelu_and_mul_backward.batch("grad", "x")


@gelu_and_mul_backward.check
def _check(x: Tensor, grad: Tensor) -> None:
    _gates.check_backward("gelu_and_mul_backward", x, grad)


@gelu_and_mul_backward.fake
def _fake(x: Tensor, grad: Tensor) -> Tensor:
    return _gates.fake_backward(x)
