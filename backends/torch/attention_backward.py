"""attention_backward: that of flash attention where PyTorch has it, else the reference."""

from __future__ import annotations

from torch import Tensor

from torch_ops.declarations.attention_backward import attention_backward as _declaration

from . import _flash

__all__ = ["attention_backward"]


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
    flash = _flash.takes(q, k, v, is_causal, scale, window_left, logits_soft_cap)
    if flash and grad_lse is None:  # it has no gradient of the LSE
        return _flash.backward(q, k, v, out, lse, grad, is_causal, scale, window_left)
    found: tuple[Tensor, Tensor, Tensor] = _declaration.reference(
        q, k, v, out, lse, grad, grad_lse, is_causal, scale, window_left, logits_soft_cap
    )
    return found
