"""The compiled norm, then the compiled quantization: one graph of both sums a row otherwise."""

from __future__ import annotations

from torch import Tensor

from . import quantize_fp8_per_group as quantization
from . import rms_norm as norm

__all__ = ["rms_norm_quant_fp8_per_group", "supports"]


def rms_norm_quant_fp8_per_group(
    x: Tensor, weight: Tensor, eps: float = 1e-6, group_size: int = 128
) -> tuple[Tensor, Tensor]:
    normed = norm.rms_norm(x, weight, eps)
    q, out = quantization.quantize_fp8_per_group(normed, group_size)
    return q, out


def supports(x: Tensor, weight: Tensor, eps: float = 1e-6, group_size: int = 128) -> str | None:
    return norm.supports(x, weight, eps) or quantization.supports(x, group_size)
