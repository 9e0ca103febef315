"""varlen_attention_with_lse: attention over packed sequences, with its log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.contracts import RaggedAttentionContract
from torch_ops.declarations import _ragged
from torch_ops.declare import op


@op(contract=RaggedAttentionContract())
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
    """Attend each sequence's queries to its keys, with the log of each softmax's denominator.

    With ``q_b``, ``k_b``, ``v_b`` the rows of sequence b::

        out_b, lse_b = attention_with_lse(q_b, k_b, v_b, ...)

    Args:
        q: ``[T, H, D]`` float16, bfloat16, float32 or float64, any strides; sequence b has the
            rows ``qo_indptr[b]`` to ``qo_indptr[b + 1]``, the rows behind the last are padding.
        k: ``[N, K, D]``, dtype and device of ``q``; K divides H, query head h reads key head
            h // (H / K). Rows behind the last sequence are never read.
        v: ``[N, K, Dv]``, dtype and device of ``q``.
        qo_indptr: ``[B + 1]`` int32 from 0 to at most T, never falling.
        kv_indptr: ``[B + 1]`` int32 from 0 to at most N, never falling.
        max_qo_len: At least the number of queries of the longest sequence.
        max_kv_len: At least the number of keys of the longest sequence.
        is_causal: Query i of n attends to keys up to i + m - n of m: the last query to all keys.
        scale: Multiplier of the logits. Default ``D ** -0.5``.
        window_left: How many keys before its own a query attends to, -1 for all.
        logits_soft_cap: ``cap * tanh(logit / cap)`` before the mask; 0 is none.

    Returns:
        ``(out, lse)``: ``[T, H, Dv]`` of dtype of ``q`` and ``[T, H]`` float32, natural logarithm,
        both contiguous. Zeros and -inf for a row with nothing to attend, as are the rows behind
        the last sequence.

    What the bounds hold is a precondition, checked in ``torch_ops.debug()`` alone.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, or a number is out of range.
        NoBackwardError: an input requires grad.

    Source: Dao, FlashAttention-2 (arXiv 2307.08691): packed sequences, bottom-right mask.
    """
    numbers = is_causal, scale, window_left, logits_soft_cap
    return _ragged.reference(q, k, v, qo_indptr, kv_indptr, max_qo_len, max_kv_len, *numbers)


@varlen_attention_with_lse.check
def _check(
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
) -> None:
    numbers = scale, window_left, logits_soft_cap
    _ragged.check_packed(
        "varlen_attention_with_lse", q, k, v, qo_indptr, kv_indptr, max_qo_len, max_kv_len, *numbers
    )


@varlen_attention_with_lse.debug_check
def _debug_check(
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
) -> None:
    _ragged.check_bounds(
        "varlen_attention_with_lse", q, k, qo_indptr, kv_indptr, max_qo_len, max_kv_len
    )


@varlen_attention_with_lse.fake
def _fake(
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
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)
