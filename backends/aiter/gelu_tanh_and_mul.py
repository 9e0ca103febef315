"""AITER's gelu_tanh_and_mul."""

from torch import Tensor

from ._gates import activate, refusal

__all__ = ["gelu_tanh_and_mul", "supports"]


def supports(x: Tensor) -> str | None:
    return refusal(x)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    return activate("gelu_tanh_and_mul", x)
