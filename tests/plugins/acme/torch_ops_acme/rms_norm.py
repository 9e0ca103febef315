"""rms_norm by the norm of the row; it wants a weight of the input's dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def supports(x: Tensor, weight: Tensor | None, eps: float) -> str | None:
    if weight is None:
        return "weight is None (required)"
    if weight.dtype != x.dtype:
        return f"weight dtype {weight.dtype} (supported: {x.dtype}, that of x); convert the weight"
    return None


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    if weight is None:
        raise AssertionError("called in spite of what supports() said")
    wide = x.contiguous().to(torch.float64)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    mean_of_squares = norm * norm / x.shape[-1]
    return (wide * torch.rsqrt(mean_of_squares + eps) * weight.to(torch.float64)).to(x.dtype)
