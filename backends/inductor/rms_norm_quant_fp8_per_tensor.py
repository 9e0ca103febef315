"""The compiled norm, then the compiled quantization: one graph of both sums a row otherwise."""

from __future__ import annotations

from torch import Tensor

from . import quantize_fp8_per_tensor as quantization
from . import rms_norm as norm

__all__ = ["rms_norm_quant_fp8_per_tensor", "supports"]


def rms_norm_quant_fp8_per_tensor(
    x: Tensor, weight: Tensor, scale: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    normed = norm.rms_norm(x, weight, eps)
    q, out = quantization.quantize_fp8_per_tensor(normed, scale)
    return q, out


def supports(x: Tensor, weight: Tensor, scale: Tensor, eps: float = 1e-6) -> str | None:
    return norm.supports(x, weight, eps) or quantization.supports(x, scale)
