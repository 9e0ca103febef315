"""FlashInfer's gemma_fused_add_rmsnorm on copies; never chosen, see `fused_add_rms_norm_`."""

import torch
from torch import Tensor

from torch_ops import limits

from . import _modules
from .fused_add_rms_norm_ import supports

__all__ = ["gemma_fused_add_rms_norm", "supports"]


def gemma_fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    out = x.clone(memory_format=torch.contiguous_format)
    residual_out = residual.clone(memory_format=torch.contiguous_format)
    if x.numel():
        fused = _modules.norm("gemma_fused_add_rmsnorm")
        fused(limits.rows(out), limits.rows(residual_out), weight, eps, _modules.pdl(x))
    return out, residual_out
