"""topk_softmax in Triton."""

from torch import Tensor

from ._launch import refuses_bfloat16
from ._routing import route

__all__ = ["supports", "topk_softmax"]


def topk_softmax(logits: Tensor, k: int, renormalize: bool = False) -> tuple[Tensor, Tensor]:
    return route(logits, k, renormalize)


supports = refuses_bfloat16(topk_softmax)
