"""attention: scaled dot product attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_ops.contracts import AttentionContract
from torch_ops.declarations import _attention
from torch_ops.declarations.attention_with_lse import attention_with_lse as _with_lse
from torch_ops.declare import op
from torch_ops.training import Run, Saved


@op(contract=AttentionContract())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> Tensor:
    """Attend queries to keys and values.

    out[b, i, h] = softmax(scale * q[b, i, h] @ k[b, :, h // (H / K)].T) @ v[b, :, h // (H / K)]

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
        ``[B, S_q, H, Dv]``, dtype of ``q``, contiguous; zeros for a query with nothing to attend.
        Logits, softmax and sums are float32 (float64 for float64 input). Where a gradient is
        wanted, `attention_with_lse` runs in this op's place: backward needs the LSE, and no more
        than that is kept beside q, k, v and the result.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, or a number is out of range.
        NoBackwardError: an input requires grad and the backend has no backward, or gradients
            are differentiated once more: they are of first order.

    Source: Vaswani et al., Attention Is All You Need (arXiv 1706.03762).
    """
    return _attention.reference(q, k, v, is_causal, scale, window_left, logits_soft_cap)[0]


attention.batch("q", "k", "v", merge=True)


@attention.check
def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> None:
    _attention.check("attention", q, k, v, scale, window_left, logits_soft_cap)


@attention.fake
def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


@attention.backward(
    "attention_backward",
    saves=("q", "k", "v", "out0", "out1"),
    forward=_with_lse,
    whole=True,
)
def _gradients(run: Run, grads: Sequence[Tensor], saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    return _attention.differentiate(run, grads[0], None, saved)
