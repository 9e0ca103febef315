"""min_p_filter in Triton."""

from torch import Tensor

from ._sampling import keep_min_p

__all__ = ["min_p_filter"]


def min_p_filter(probs: Tensor, min_p: Tensor) -> Tensor:
    return keep_min_p(probs, min_p)
