"""silu_and_mul_backward: the gradient of silu_and_mul."""

from __future__ import annotations

from torch import Tensor

from torch_ops.contracts import GateContract
from torch_ops.declarations import _gates
from torch_ops.declare import op


@op(contract=GateContract(activation="silu", rounding="once"))
def silu_and_mul_backward(x: Tensor, grad: Tensor) -> Tensor:
    """Give the gradient of the input of `silu_and_mul` from that of its result.

    dgate = grad * value * s * (1 + gate * (1 - s)), dvalue = grad * gate * s, s = sigmoid(gate)

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

    Source: Shazeer, GLU Variants Improve Transformer (arXiv 2002.05202).
    """
    gate, _ = _gates.split(x)
    s = gate.sigmoid()
    return _gates.gradient(grad, x, gate * s, s * (1 + gate * (1 - s)))


silu_and_mul_backward.batch("grad", "x")


@silu_and_mul_backward.check
def _check(x: Tensor, grad: Tensor) -> None:
    _gates.check_backward("silu_and_mul_backward", x, grad)


@silu_and_mul_backward.fake
def _fake(x: Tensor, grad: Tensor) -> Tensor:
    return _gates.fake_backward(x)
