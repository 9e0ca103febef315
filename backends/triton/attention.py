"""attention in Triton, for calls and for layers."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.attention.backend import AttentionBackend
from torch_ops.attention.prepared import AttentionSpec, PreparedAttention

from ._attention import forward, refusal

__all__ = ["attention", "prepare", "supports", "supports_call"]


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


def prepare(spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> PreparedAttention:
    return _Prepared(spec)


class _Prepared(PreparedAttention):
    backend = AttentionBackend.TRITON

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec = self._spec
        return forward(
            q, k, v, spec.is_causal, spec.scale, spec.window_left, spec.logits_soft_cap, False
        )[0]
