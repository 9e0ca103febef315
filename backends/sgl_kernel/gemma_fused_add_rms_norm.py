"""sgl-kernel's gemma_fused_add_rmsnorm on copies; never chosen, as it takes no float32.

In float16 and bfloat16 it normalizes the sum in float32, before it is rounded to be stored.
"""

import torch
from torch import Tensor

from torch_ops import limits

from . import _fused_add

__all__ = ["gemma_fused_add_rms_norm", "supports"]


def supports(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> str | None:
    if x.dtype not in limits.HALVES:
        return limits.unsupported("x", x, limits.HALVES)
    return limits.unrounded_sum(x)


def gemma_fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    out = x.clone(memory_format=torch.contiguous_format)
    residual_out = residual.clone(memory_format=torch.contiguous_format)
    _fused_add.fuse(out, residual_out, weight, eps, "gemma_fused_add_rmsnorm")
    return out, residual_out
