"""FlashInfer's fused_add_rmsnorm on copies; never chosen, see `fused_add_rms_norm_`."""

import torch
from torch import Tensor

from .fused_add_rms_norm_ import fused_add_rms_norm_, supports

__all__ = ["fused_add_rms_norm", "supports"]


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    out = x.clone(memory_format=torch.contiguous_format)
    residual_out = residual.clone(memory_format=torch.contiguous_format)
    fused_add_rms_norm_(out, residual_out, weight, eps)
    return out, residual_out
