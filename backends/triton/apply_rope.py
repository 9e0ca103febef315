"""apply_rope in Triton."""

from torch import Tensor

from ._launch import refuses_bfloat16
from ._rotary import rotate

__all__ = ["apply_rope", "supports"]


def apply_rope(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> tuple[Tensor, Tensor]:
    return rotate(q, k, cos_sin_cache, positions, is_neox)


supports = refuses_bfloat16(apply_rope)
