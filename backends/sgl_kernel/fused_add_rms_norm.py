"""sgl-kernel's fused_add_rmsnorm on copies: it has no other form."""

import torch
from torch import Tensor

from . import _fused_add

__all__ = ["fused_add_rms_norm", "supports"]


def supports(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> str | None:
    return _fused_add.refusal(x, residual, weight)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    out = x.clone(memory_format=torch.contiguous_format)
    residual_out = residual.clone(memory_format=torch.contiguous_format)
    _fused_add.fuse(out, residual_out, weight, eps)
    return out, residual_out
