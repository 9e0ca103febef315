"""attention_backward: the gradients of attention and attention_with_lse."""

from __future__ import annotations

from torch import Tensor

from torch_ops.contracts import AttentionGradientContract
from torch_ops.declarations import _attention_gradients
from torch_ops.declare import op


@op(contract=AttentionGradientContract())
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradients of the inputs of `attention_with_lse` from those of its results.

    p = exp(logits - lse), dp = grad @ v.T, ds = p * (dp - sum(grad * out) + grad_lse)
    grad_q = scale * ds @ k, grad_k = scale * ds.T @ q, grad_v = p.T @ grad

    A soft cap multiplies ds by ``1 - (logits / cap) ** 2``; gradients of a key head are the sums
    of those by the query heads that read it.

    Args:
        q: ``[B, S_q, H, D]`` float16, bfloat16, float32 or float64, any strides.
        k: ``[B, S_kv, K, D]``, dtype and device of ``q``; K divides H.
        v: ``[B, S_kv, K, Dv]``, dtype and device of ``q``.
        out, lse: ``[B, S_q, H, Dv]`` of dtype of ``q`` and ``[B, S_q, H]`` float32: what
            `attention_with_lse` gives for these q, k and v. A kernel may also compute them anew,
            as the reference does.
        grad: The gradient of ``out``, of its shape and dtype, any strides.
        grad_lse: The gradient of ``lse``, of its shape, float32; None for zeros.
        is_causal, scale, window_left, logits_soft_cap: As `attention` takes them.

    Returns:
        ``(grad_q, grad_k, grad_v)``, shapes and dtype of q, k and v, contiguous; zeros for a query
        with nothing to attend and for a key that no query attends to. Sums are float32 (float64
        for float64 input); terms of products may be of the input's dtype.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, or a number is out of range.
        NoBackwardError: an input requires grad.

    Source: Dao et al., FlashAttention (arXiv 2205.14135), appendix B.2.
    """
    return _attention_gradients.gradients(
        q, k, v, grad, grad_lse, is_causal, scale, window_left, logits_soft_cap
    )


@attention_backward.check
def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> None:
    _attention_gradients.check(
        "attention_backward", q, k, v, out, lse, grad, grad_lse, scale, window_left, logits_soft_cap
    )


@attention_backward.fake
def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
