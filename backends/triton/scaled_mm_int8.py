"""scaled_mm_int8 in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from ._launch import INTERPRETED
from ._scaled_mm import multiply

__all__ = ["scaled_mm_int8", "supports"]


def supports(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> str | None:
    if out_dtype == torch.bfloat16 and INTERPRETED:
        return (
            "torch.bfloat16 is untestable in Triton's interpreter, which truncates where a GPU "
            "rounds (supported there: torch.float16, torch.float32)"
        )
    return None


def scaled_mm_int8(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    return multiply(a, b, scale_a, scale_b, out_dtype, bias)
