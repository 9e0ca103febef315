"""The compiled gate, then the compiled quantization: one graph of both gave other bits on sm_90."""

from __future__ import annotations

from torch import Tensor

from . import quantize_fp8_per_group as quantization
from . import silu_and_mul as gate

__all__ = ["silu_and_mul_quant_fp8_per_group", "supports"]


def silu_and_mul_quant_fp8_per_group(x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
    gated = gate.silu_and_mul(x)
    q, out = quantization.quantize_fp8_per_group(gated, group_size)
    return q, out


def supports(x: Tensor, group_size: int = 128) -> str | None:
    return gate.supports(x) or quantization.supports(x[..., : x.shape[-1] // 2], group_size)
