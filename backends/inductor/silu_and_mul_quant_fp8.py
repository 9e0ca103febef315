"""The compiled gate, then the compiled quantization: one graph of both gave other bits on sm_90."""

from __future__ import annotations

from torch import Tensor

from . import quantize_fp8_per_token as quantization
from . import silu_and_mul as gate

__all__ = ["silu_and_mul_quant_fp8", "supports"]


def silu_and_mul_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    q, scale = quantization.quantize_fp8_per_token(gate.silu_and_mul(x))
    return q, scale


def supports(x: Tensor) -> str | None:
    return gate.supports(x) or quantization.supports(x)
