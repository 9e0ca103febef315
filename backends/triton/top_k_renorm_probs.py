"""top_k_renorm_probs in Triton."""

from torch import Tensor

from ._sampling import renormalize_top_k

__all__ = ["top_k_renorm_probs"]


def top_k_renorm_probs(probs: Tensor, k: Tensor) -> Tensor:
    return renormalize_top_k(probs, k)
