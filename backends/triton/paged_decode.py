"""paged_decode in Triton."""

from __future__ import annotations

from torch import Tensor

from ._attention import refusal
from ._paged_decode import forward

__all__ = ["paged_decode", "supports"]


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> Tensor:
    return forward(
        q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len, scale, window_left,
        logits_soft_cap,
    )  # fmt: skip


def supports(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> str | None:
    return refusal(q.dtype, q.shape[-1], v_cache.shape[-1], scale)
