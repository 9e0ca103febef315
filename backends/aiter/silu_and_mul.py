"""AITER's silu_and_mul."""

from torch import Tensor

from ._gates import activate, refusal

__all__ = ["silu_and_mul", "supports"]


def supports(x: Tensor) -> str | None:
    return refusal(x)


def silu_and_mul(x: Tensor) -> Tensor:
    return activate("silu_and_mul", x)
