"""FlashInfer's batched prefill of packed sequences with its LSE; it waits for the GPU."""

from __future__ import annotations

from torch import Tensor

from ._prefill import family
from ._sequences import Call, Table, attend
from .varlen_attention import supports

__all__ = ["supports", "varlen_attention_with_lse"]


def varlen_attention_with_lse(
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
) -> tuple[Tensor, Tensor]:
    call = Call("varlen_attention_with_lse", family(q.device), is_causal, scale, window_left, True)
    out, lse = attend(call, q, k, v, Table(qo_indptr, kv_indptr))
    return out, lse
