"""apply_rope_ in Triton."""

from torch import Tensor

from ._launch import refuses_bfloat16
from ._rotary import rotate_in_place

__all__ = ["apply_rope_", "supports"]


def apply_rope_(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> None:
    rotate_in_place(q, k, cos_sin_cache, positions, is_neox)


supports = refuses_bfloat16(apply_rope_)
