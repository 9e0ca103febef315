"""FlashInfer's silu_and_mul."""

from torch import Tensor

from torch_ops import limits

from ._gates import activate

__all__ = ["silu_and_mul", "supports"]


def supports(x: Tensor) -> str | None:
    return limits.gate(x, limits.HALVES)


def silu_and_mul(x: Tensor) -> Tensor:
    return activate("silu", x)
