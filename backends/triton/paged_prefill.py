"""paged_prefill in Triton."""

from __future__ import annotations

from torch import Tensor

from ._attention import refusal
from ._ragged import Bounds, forward

__all__ = ["paged_prefill", "supports"]


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    is_causal: bool = True,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> Tensor:
    bounds = Bounds(qo_indptr, kv_indptr, kv_indices, kv_last_page_len)
    numbers = (is_causal, scale, window_left, logits_soft_cap)
    return forward(q, k_cache, v_cache, bounds, *numbers, False)[0]


def supports(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    is_causal: bool = True,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> str | None:
    return refusal(q.dtype, q.shape[-1], v_cache.shape[-1], scale)
