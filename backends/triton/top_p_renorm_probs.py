"""top_p_renorm_probs in Triton."""

from torch import Tensor

from ._sampling import renormalize_top_p

__all__ = ["top_p_renorm_probs"]


def top_p_renorm_probs(probs: Tensor, p: Tensor) -> Tensor:
    return renormalize_top_p(probs, p)
