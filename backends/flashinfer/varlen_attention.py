"""FlashInfer's batched prefill of packed sequences; it waits for the GPU."""

from __future__ import annotations

from torch import Tensor

from ._prefill import family
from ._sequences import Call, Table, attend, refusal

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
    call = Call("varlen_attention", family(q.device), is_causal, scale, window_left, False)
    return attend(call, q, k, v, Table(qo_indptr, kv_indptr))[0]


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
    return refusal(q, k, v, ("k", "v"), scale, logits_soft_cap)
