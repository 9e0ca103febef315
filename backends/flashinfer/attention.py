"""FlashInfer's prefill for attention, and for layers: FA2 and FA3, each pinned."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.attention.backend import AttentionBackend
from torch_ops.attention.prepared import AttentionSpec, PreparedAttention

from . import _prefill

__all__ = ["attention", "prepare", "supports", "supports_call"]

_FAMILIES = {"flashinfer_fa2": "fa2", "flashinfer_fa3": "fa3"}


def supports_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> str | None:
    head_dim, value_dim = q.shape[3], v.shape[3]
    reason = _prefill.refusal(q.dtype, head_dim, scale, logits_soft_cap)
    if reason is None and value_dim != head_dim:
        reason = f"head_dim {value_dim} of v (supported: {head_dim}, that of q)"
    if reason is not None or not (q.numel() and k.numel()):
        return reason
    return _prefill.layout("q", q) or _prefill.layout("k", k) or _prefill.layout("v", v)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> Tensor:
    name = _prefill.family(q.device)
    return _prefill.attend(q, k, v, is_causal, scale, window_left, name, False)[0]


def supports(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, backend: AttentionBackend
) -> str | None:
    reason = _prefill.refusal(dtype, spec.head_dim, spec.scale, spec.logits_soft_cap)
    return reason or _prefill.unfit(_FAMILIES[backend.value], device)


def prepare(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, backend: AttentionBackend
) -> PreparedAttention:
    _prefill.load(_FAMILIES[backend.value], dtype, spec.head_dim, spec.window_left >= 0)
    return _Prefill(spec, backend)


class _Prefill(PreparedAttention):
    """One family; tensors that it can't read where they lie are copied."""

    def __init__(self, spec: AttentionSpec, backend: AttentionBackend) -> None:
        self.backend = backend
        self._spec = spec
        self._family = _FAMILIES[backend.value]

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec = self._spec
        q, k, v = (x if _prefill.layout("", x) is None else _copied(x) for x in (q, k, v))
        return _prefill.attend(
            q, k, v, spec.is_causal, spec.scale, spec.window_left, self._family, False
        )[0]


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
