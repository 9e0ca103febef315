"""attention_with_lse: scaled dot product attention with its log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ops.contracts import AttentionContract
from torch_ops.declarations import _attention
from torch_ops.declare import op
from torch_ops.training import Run, Saved


@op(contract=AttentionContract())
def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attend queries to keys and values, with the logarithm of each softmax's denominator.

    out = attention(q, k, v, ...)
    lse[b, i, h] = log(sum(exp(logits[b, i, h])))

    Args:
        q: ``[B, S_q, H, D]`` float16, bfloat16, float32 or float64, any strides.
        k: ``[B, S_kv, K, D]``, dtype and device of ``q``; K divides H, query head h reads key head
            h // (H / K).
        v: ``[B, S_kv, K, Dv]``, dtype and device of ``q``.
        is_causal: Query i attends to keys up to i + S_kv - S_q: the last query to all keys.
        scale: Multiplier of the logits. Default ``D ** -0.5``.
        window_left: How many keys before its own a query attends to, -1 for all.
        logits_soft_cap: ``cap * tanh(logit / cap)`` before the mask; 0 is none.

    Returns:
        ``(out, lse)``: ``[B, S_q, H, Dv]`` of dtype of ``q`` and ``[B, S_q, H]`` float32, natural
        logarithm, both contiguous. A query with nothing to attend gives zeros and -inf. Both have
        gradients; q, k, v and both results are kept for them.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, or a number is out of range.
        NoBackwardError: an input requires grad and the backend has no backward, or gradients
            are differentiated once more: they are of first order.

    Source: Vaswani et al., Attention Is All You Need (arXiv 1706.03762).
    """
    return _attention.reference(q, k, v, is_causal, scale, window_left, logits_soft_cap)


attention_with_lse.batch("q", "k", "v", merge=True)


@attention_with_lse.check
def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> None:
    _attention.check("attention_with_lse", q, k, v, scale, window_left, logits_soft_cap)


@attention_with_lse.fake
def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@attention_with_lse.backward(
    "attention_backward", saves=("q", "k", "v", "out0", "out1"), sparse=True, whole=True
)
def _gradients(
    run: Run, grads: Sequence[Tensor | None], saved: Saved
) -> tuple[Tensor, Tensor, Tensor]:
    grad, grad_lse = grads
    grad = torch.zeros_like(saved["out0"]) if grad is None else grad
    return _attention.differentiate(run, grad, grad_lse, saved)
