"""FlashInfer's prefill with its LSE, turned into a natural logarithm."""

from __future__ import annotations

from torch import Tensor

from . import _prefill
from .attention import supports_call as supports

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
    call = _prefill.Call(_prefill.family(q.device), is_causal, scale, window_left, True)
    out, lse = _prefill.attend(call, q, k, v)
    assert lse is not None
    return out, lse
