"""sample_top_k_top_p in Triton."""

from torch import Tensor

from ._sampling import draw

__all__ = ["sample_top_k_top_p"]


def sample_top_k_top_p(probs: Tensor, k: Tensor, p: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    return draw(probs, k, p, seed, offset)
