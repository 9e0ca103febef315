"""scaled_mm_fp8 in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from ._scaled_mm import multiply, refusal

__all__ = ["scaled_mm_fp8", "supports"]


def supports(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> str | None:
    return refusal(a.dtype, a.get_device())


def scaled_mm_fp8(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    return multiply(a, b, scale_a, scale_b, out_dtype, bias)
