"""merge_state in Triton."""

from torch import Tensor

from ._launch import refuses_bfloat16
from ._merges import merge

__all__ = ["merge_state", "supports"]


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    return merge(v_a, s_a, v_b, s_b)


supports = refuses_bfloat16(merge_state)
