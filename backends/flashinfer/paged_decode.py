"""FlashInfer's batched prefill of one query a sequence; it waits for the GPU."""

from __future__ import annotations

from torch import Tensor

from ._sequences import Call, Table, attend, refusal

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
    # Tensor cores, which FlashInfer's decode doesn't take by default; FA2 splits keys.
    call = Call("paged_decode", "fa2", False, scale, window_left, False)
    table = Table(None, kv_indptr, kv_indices, kv_last_page_len)
    return attend(call, q, k_cache, v_cache, table)[0]


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
    return refusal(q, k_cache, v_cache, ("k_cache", "v_cache"), scale, logits_soft_cap)
