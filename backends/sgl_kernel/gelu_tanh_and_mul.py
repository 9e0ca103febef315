"""sgl-kernel's gelu_tanh_and_mul.

It is never chosen: its build for sm_90 takes tanh from the instruction MUFU.TANH. For gates below
zero, where 1 + tanh cancels, the result is off by tens of percent.
"""

from torch import Tensor

from torch_ops import limits

from ._gates import DTYPES, activate

__all__ = ["gelu_tanh_and_mul", "supports"]


def supports(x: Tensor) -> str | None:
    return limits.gate(x, DTYPES) or (
        "tanh has a relative error of 2**-11, by MUFU.TANH in the build for sm_90; other builds "
        "aren't verified (the op's contract: float32)"
    )


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    return activate("gelu_tanh_and_mul", x)
