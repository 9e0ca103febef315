"""varlen_attention_with_lse in Triton."""

from __future__ import annotations

from torch import Tensor

from ._attention import refusal
from ._ragged import Bounds, forward

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
    bounds = Bounds(qo_indptr, kv_indptr, longest=max_qo_len)
    numbers = (is_causal, scale, window_left, logits_soft_cap)
    out, lse = forward(q, k, v, bounds, *numbers, True)
    assert lse is not None
    return out, lse


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
