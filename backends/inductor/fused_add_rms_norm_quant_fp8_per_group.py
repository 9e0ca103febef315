"""The compiled norm, then the compiled quantization: one graph of both sums a row otherwise."""

from __future__ import annotations

from torch import Tensor

from . import fused_add_rms_norm as norm
from . import quantize_fp8_per_group as quantization

__all__ = ["fused_add_rms_norm_quant_fp8_per_group", "supports"]


def fused_add_rms_norm_quant_fp8_per_group(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, group_size: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    normed, residual_out = norm.fused_add_rms_norm(x, residual, weight, eps)
    q, out = quantization.quantize_fp8_per_group(normed, group_size)
    return q, out, residual_out


def supports(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, group_size: int = 128
) -> str | None:
    return norm.supports(x, residual, weight, eps) or quantization.supports(x, group_size)
