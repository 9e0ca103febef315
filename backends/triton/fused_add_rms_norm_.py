"""fused_add_rms_norm_ in Triton."""

from torch import Tensor

from ._launch import refuses_bfloat16
from ._norms import add_normalize_in_place

__all__ = ["fused_add_rms_norm_", "supports"]


def fused_add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    add_normalize_in_place(x, residual, weight, eps)


supports = refuses_bfloat16(fused_add_rms_norm_)
