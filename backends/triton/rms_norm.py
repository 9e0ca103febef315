"""rms_norm in Triton."""

from torch import Tensor

from ._launch import refuses_bfloat16
from ._norms import RMS, normalize

__all__ = ["rms_norm", "supports"]


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return normalize(x, weight, None, eps, RMS)


supports = refuses_bfloat16(rms_norm)
