"""sgl-kernel's silu_and_mul."""

from torch import Tensor

from torch_ops import limits

from ._gates import DTYPES, activate

__all__ = ["silu_and_mul", "supports"]


def supports(x: Tensor) -> str | None:
    return limits.gate(x, DTYPES)


def silu_and_mul(x: Tensor) -> Tensor:
    return activate("silu_and_mul", x)
