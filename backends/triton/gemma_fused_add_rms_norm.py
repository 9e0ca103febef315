"""gemma_fused_add_rms_norm in Triton."""

from torch import Tensor

from ._launch import refuses_bfloat16
from ._norms import ONE_PLUS, add_normalize

__all__ = ["gemma_fused_add_rms_norm", "supports"]


def gemma_fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    return add_normalize(x, residual, weight, eps, ONE_PLUS)


supports = refuses_bfloat16(gemma_fused_add_rms_norm)
