"""The compiled gate, then the compiled quantization: one graph of both gave other bits on sm_90."""

from __future__ import annotations

from torch import Tensor

from . import quantize_fp8_per_tensor as quantization
from . import silu_and_mul as gate

__all__ = ["silu_and_mul_quant_fp8_per_tensor", "supports"]


def silu_and_mul_quant_fp8_per_tensor(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    gated = gate.silu_and_mul(x)
    q, out = quantization.quantize_fp8_per_tensor(gated, scale)
    return q, out


def supports(x: Tensor, scale: Tensor) -> str | None:
    return gate.supports(x) or quantization.supports(x, scale)
