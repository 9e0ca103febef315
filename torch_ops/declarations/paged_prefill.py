"""paged_prefill: attention of the queries of each sequence to a paged cache."""

from __future__ import annotations

from torch import Tensor

from torch_ops import checks
from torch_ops.contracts import RaggedAttentionContract
from torch_ops.declarations import _paged, _ragged
from torch_ops.declare import op


@op(contract=RaggedAttentionContract())
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
    """Attend the queries of each sequence to its keys and values in a paged cache.

    With ``q_b`` the rows of sequence b and ``k_b``, ``v_b`` its tokens in the order of its pages::

        out_b = attention(q_b, k_b, v_b, ...)

    Args:
        q: ``[T, H, D]`` float16, bfloat16, float32 or float64, any strides; sequence b has the
            rows ``qo_indptr[b]`` to ``qo_indptr[b + 1]``, the rows behind the last are padding.
        k_cache: ``[P, page_size, K, D]``, dtype and device of ``q``, any strides; K divides H,
            query head h reads key head h // (H / K).
        v_cache: ``[P, page_size, K, Dv]``, dtype and device of ``q``.
        qo_indptr: ``[B + 1]`` int32 from 0 to at most T, never falling.
        kv_indptr: ``[B + 1]`` int32 from 0, never falling: sequence b has the pages
            ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``.
        kv_indices: int32 pages, each in ``[0, P)``; what is behind ``kv_indptr[B]`` isn't read.
        kv_last_page_len: ``[B]`` int32, tokens in each sequence's last page, 1 to page_size. Not
            read for a sequence without pages, which has no tokens.
        is_causal: Query i of n attends to keys up to i + m - n of m: the last query to all keys.
        scale: Multiplier of the logits. Default ``D ** -0.5``.
        window_left: How many keys before its own a query attends to, -1 for all.
        logits_soft_cap: ``cap * tanh(logit / cap)`` before the mask; 0 is none.

    Returns:
        ``[T, H, Dv]``, dtype of ``q``, contiguous; zeros for a row with nothing to attend, as are
        the rows behind the last sequence. Logits, softmax and sums are float32 (float64 for
        float64 input).

    Pages that no sequence lists and slots behind the last token are never read. What the table
    holds is a precondition, checked in ``torch_ops.debug()`` alone.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, or a number is out of range.
        NoBackwardError: an input requires grad.

    Source: Kwon et al., PagedAttention (arXiv 2309.06180).
    """
    k, v, tokens = _paged.gather(k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len)
    most = _ragged.longest(qo_indptr, q.shape[0])
    numbers = is_causal, scale, window_left, logits_soft_cap
    return _ragged.attend(q, k, v, qo_indptr, tokens, most, *numbers)[0]


@paged_prefill.check
def _check(
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
) -> None:
    checks.float_dtype("paged_prefill", "q", q)
    checks.rank("paged_prefill", "q", q, 3, "[T, H, D]")
    _ragged.check_index("paged_prefill", "qo_indptr", qo_indptr, q)
    if qo_indptr.shape[0] == 0:
        checks.refuse("paged_prefill", "qo_indptr", "of shape [0]", "[B + 1]")
    table = kv_indptr, kv_indices, kv_last_page_len
    batch, numbers = qo_indptr.shape[0] - 1, (scale, window_left, logits_soft_cap)
    _paged.check("paged_prefill", q, k_cache, v_cache, batch, *table, *numbers)


@paged_prefill.debug_check
def _debug_check(
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
) -> None:
    _ragged.check_indptr("paged_prefill", "qo_indptr", qo_indptr, q.shape[0], "the rows of 'q'")
    _paged.check_table("paged_prefill", k_cache, kv_indptr, kv_indices, kv_last_page_len)


@paged_prefill.fake
def _fake(
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
    return q.new_empty((*q.shape[:2], v_cache.shape[3]))
