"""paged_decode: attention of one query of each sequence to a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import checks
from torch_ops.contracts import RaggedAttentionContract
from torch_ops.declarations import _paged, _ragged
from torch_ops.declare import op


@op(contract=RaggedAttentionContract())
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
    """Attend one query of each sequence to its keys and values in a paged cache.

    With ``k_b``, ``v_b`` the tokens of sequence b in the order of its pages::

        out[b] = attention(q[b], k_b, v_b, ...)

    Args:
        q: ``[B, H, D]`` float16, bfloat16, float32 or float64, any strides: the query of each
            sequence, which stands at its last key.
        k_cache: ``[P, page_size, K, D]``, dtype and device of ``q``, any strides; K divides H,
            query head h reads key head h // (H / K).
        v_cache: ``[P, page_size, K, Dv]``, dtype and device of ``q``.
        kv_indptr: ``[B + 1]`` int32 from 0, never falling: sequence b has the pages
            ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``.
        kv_indices: int32 pages, each in ``[0, P)``; what is behind ``kv_indptr[B]`` isn't read.
        kv_last_page_len: ``[B]`` int32, tokens in each sequence's last page, 1 to page_size. Not
            read for a sequence without pages, which has no tokens.
        scale: Multiplier of the logits. Default ``D ** -0.5``.
        window_left: How many keys before the last a query attends to, -1 for all.
        logits_soft_cap: ``cap * tanh(logit / cap)`` before the mask; 0 is none.

    Returns:
        ``[B, H, Dv]``, dtype of ``q``, contiguous; zeros for a sequence without tokens. Logits,
        softmax and sums are float32 (float64 for float64 input).

    Pages that no sequence lists and slots behind the last token are never read. What the table
    holds is a precondition, checked in ``torch_ops.debug()`` alone.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, or a number is out of range.
        NoBackwardError: an input requires grad.

    Source: Kwon et al., PagedAttention (arXiv 2309.06180).
    """
    k, v, tokens = _paged.gather(k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len)
    one_each = torch.arange(q.shape[0] + 1, device=q.device)
    numbers = False, scale, window_left, logits_soft_cap
    return _ragged.attend(q, k, v, one_each, tokens, 1, *numbers)[0]


@paged_decode.check
def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> None:
    checks.float_dtype("paged_decode", "q", q)
    checks.rank("paged_decode", "q", q, 3, "[B, H, D]")
    table = kv_indptr, kv_indices, kv_last_page_len
    numbers = scale, window_left, logits_soft_cap
    _paged.check("paged_decode", q, k_cache, v_cache, q.shape[0], *table, *numbers)


@paged_decode.debug_check
def _debug_check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> None:
    _paged.check_table("paged_decode", k_cache, kv_indptr, kv_indices, kv_last_page_len)


@paged_decode.fake
def _fake(
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
    return q.new_empty((*q.shape[:2], v_cache.shape[3]))
