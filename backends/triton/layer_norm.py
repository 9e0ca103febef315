"""layer_norm in Triton."""

from torch import Tensor

from ._launch import refuses_bfloat16
from ._norms import LAYER, normalize

__all__ = ["layer_norm", "supports"]


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    return normalize(x, weight, bias, eps, LAYER)


supports = refuses_bfloat16(layer_norm)
