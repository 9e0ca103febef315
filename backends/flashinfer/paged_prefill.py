"""FlashInfer's batched prefill over pages; it waits for the GPU."""

from __future__ import annotations

from torch import Tensor

from ._prefill import family
from ._sequences import Call, Table, attend, refusal

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
    call = Call("paged_prefill", family(q.device), is_causal, scale, window_left, False)
    table = Table(qo_indptr, kv_indptr, kv_indices, kv_last_page_len)
    return attend(call, q, k_cache, v_cache, table)[0]


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
    return refusal(q, k_cache, v_cache, ("k_cache", "v_cache"), scale, logits_soft_cap)
