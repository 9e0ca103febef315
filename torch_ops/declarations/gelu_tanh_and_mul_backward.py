"""gelu_tanh_and_mul_backward: the gradient of gelu_tanh_and_mul."""

from __future__ import annotations

import math

from torch import Tensor

from torch_ops.contracts import GateContract
from torch_ops.declarations import _gates
from torch_ops.declare import op

_SLOPE = 2 * math.sqrt(2 / math.pi)


@op(contract=GateContract(activation="gelu_tanh", rounding="once"))
def gelu_tanh_and_mul_backward(x: Tensor, grad: Tensor) -> Tensor:
    """Give the gradient of the input of `gelu_tanh_and_mul` from that of its result.

    dgate = grad * value * (s + gate * s * (1 - s) * z'), dvalue = grad * gate * s, where
    s = sigmoid(z), z = 2 sqrt(2 / pi) (gate + 0.044715 gate ** 3): (1 + tanh(z / 2)) / 2.

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
    square = gate * gate
    s = (_SLOPE * gate * (1 + 0.044715 * square)).sigmoid()
    steep = _SLOPE * (1 + 3 * 0.044715 * square)
    return _gates.gradient(grad, x, gate * s, s + gate * s * (1 - s) * steep)


gelu_tanh_and_mul_backward.batch("grad", "x")


@gelu_tanh_and_mul_backward.check
def _check(x: Tensor, grad: Tensor) -> None:
    _gates.check_backward("gelu_tanh_and_mul_backward", x, grad)


@gelu_tanh_and_mul_backward.fake
def _fake(x: Tensor, grad: Tensor) -> Tensor:
    return _gates.fake_backward(x)
