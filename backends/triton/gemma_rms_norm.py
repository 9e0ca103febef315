"""gemma_rms_norm in Triton."""

from torch import Tensor

from ._launch import refuses_bfloat16
from ._norms import ONE_PLUS, normalize

__all__ = ["gemma_rms_norm", "supports"]


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return normalize(x, weight, None, eps, ONE_PLUS)


supports = refuses_bfloat16(gemma_rms_norm)
