"""FlashInfer's gelu_tanh_and_mul.

It is never chosen: it takes tanh from the instruction tanh.approx.f32. For gates below zero, where
1 + tanh cancels, the result is off by tens of percent.
"""

from torch import Tensor

from torch_ops import limits

from ._gates import activate

__all__ = ["gelu_tanh_and_mul", "supports"]


def supports(x: Tensor) -> str | None:
    return limits.gate(x, limits.HALVES) or (
        "tanh has a relative error of 2**-11, by tanh.approx.f32 (the op's contract: float32)"
    )


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    return activate("gelu_tanh", x)
