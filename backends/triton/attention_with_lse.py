"""attention_with_lse in Triton."""

from __future__ import annotations

from torch import Tensor

from ._attention import forward, refusal

__all__ = ["attention_with_lse", "supports"]


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    out, lse = forward(q, k, v, is_causal, scale, window_left, logits_soft_cap, True)
    assert lse is not None
    return out, lse


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> str | None:
    return refusal(q.dtype, q.shape[-1], v.shape[-1], scale)
