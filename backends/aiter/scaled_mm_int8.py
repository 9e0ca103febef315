"""AITER's gemm_a8w8."""

from __future__ import annotations

import torch
from torch import Tensor

from ._products import multiply, supports

__all__ = ["scaled_mm_int8", "supports"]


def scaled_mm_int8(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    return multiply(a, b, scale_a, scale_b, out_dtype)
