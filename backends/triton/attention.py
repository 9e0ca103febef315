"""attention in Triton, for calls and for layers."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.attention.backend import AttentionBackend
from torch_ops.attention.calls import PreparedCalls
from torch_ops.attention.prepared import AttentionSpec, PreparedAttention

from ._attention import forward, refusal
from .paged_decode import paged_decode
from .paged_prefill import paged_prefill
from .varlen_attention import varlen_attention

__all__ = [
    "attention",
    "prepare",
    "supports",
    "supports_call",
    "supports_paged",
    "supports_ragged",
]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> Tensor:
    return forward(q, k, v, is_causal, scale, window_left, logits_soft_cap, False)[0]


def supports_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> str | None:
    return refusal(q.dtype, q.shape[-1], v.shape[-1], scale)


def supports(spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    return refusal(dtype, spec.head_dim, spec.head_dim, spec.scale)


supports_ragged = supports_paged = supports


def prepare(spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> PreparedAttention:
    return _Prepared(spec)


class _Prepared(PreparedCalls):
    backend = AttentionBackend.TRITON
    varlen_attention = varlen_attention
    paged_prefill = paged_prefill
    paged_decode = paged_decode

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec = self.spec
        return forward(
            q, k, v, spec.is_causal, spec.scale, spec.window_left, spec.logits_soft_cap, False
        )[0]
