"""attention_with_lse: flash attention where PyTorch has it, else the reference."""

from __future__ import annotations

from torch import Tensor

from torch_ops.declarations.attention_with_lse import attention_with_lse as _declaration

from . import _flash

__all__ = ["attention_with_lse"]


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    if _flash.takes(q, k, v, is_causal, scale, window_left, logits_soft_cap):
        return _flash.forward(q, k, v, is_causal, scale, window_left)
    found: tuple[Tensor, Tensor] = _declaration.reference(
        q, k, v, is_causal, scale, window_left, logits_soft_cap
    )
    return found
