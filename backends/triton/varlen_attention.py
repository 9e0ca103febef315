"""varlen_attention in Triton."""

from __future__ import annotations

from torch import Tensor

from ._attention import refusal
from ._ragged import Bounds, forward

__all__ = ["supports", "varlen_attention"]


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    max_qo_len: int,
    max_kv_len: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> Tensor:
    bounds = Bounds(qo_indptr, kv_indptr, longest=max_qo_len)
    numbers = (is_causal, scale, window_left, logits_soft_cap)
    return forward(q, k, v, bounds, *numbers, False)[0]


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    max_qo_len: int,
    max_kv_len: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> str | None:
    return refusal(q.dtype, q.shape[-1], v.shape[-1], scale)
