"""FlashInfer's prefill for attention, and for layers: FA2 and FA3, each pinned."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from torch_ops import limits
from torch_ops.attention.backend import AttentionBackend
from torch_ops.attention.metadata import AttentionMetadata, Tables
from torch_ops.attention.prepared import AttentionSpec, PreparedAttention

from . import _paged, _prefill

__all__ = ["attention", "prepare", "supports", "supports_call", "supports_paged"]

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
    _, queries, heads, head_dim = q.shape
    reason = _prefill.refusal(q.dtype, head_dim, scale, logits_soft_cap)
    if reason is not None:
        return reason
    _, keys, kv_heads, value_dim = v.shape
    if value_dim != head_dim:
        return f"head_dim {value_dim} of v (supported: {head_dim}, that of q)"
    if not (q.numel() and k.numel()):
        return None
    if (
        min(queries, keys, heads, kv_heads) > 1  # an axis of size 1 may have any stride
        and q.is_contiguous()
        and k.is_contiguous()
        and v.is_contiguous()
        and not (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
        and max(q.numel(), k.numel()) <= limits.OFFSETS
    ):
        return None
    reason = _prefill.layout("q", q) or _prefill.layout("k", k) or _prefill.layout("v", v)
    return reason or _prefill.apart(_prefill.family(q.device), is_causal, k, v)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> Tensor:
    call = _prefill.Call(_prefill.family(q.device), is_causal, scale, window_left, False)
    return _prefill.attend(call, q, k, v)[0]


def supports(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, backend: AttentionBackend
) -> str | None:
    reason = _prefill.refusal(dtype, spec.head_dim, spec.scale, spec.logits_soft_cap)
    return reason or _prefill.unfit(_FAMILIES[backend.value], device)


def supports_paged(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, backend: AttentionBackend
) -> str | None:
    if backend is not AttentionBackend.FLASHINFER_FA2:
        return f"paged calls ({AttentionBackend.FLASHINFER_FA2.value} takes them)"
    return supports(spec, device, dtype, backend)


def prepare(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, backend: AttentionBackend
) -> PreparedAttention:
    return _Prefill(spec, backend, dtype)


class _Prefill(PreparedAttention):
    """One family; tensors that it can't read where they lie are copied."""

    def __init__(self, spec: AttentionSpec, backend: AttentionBackend, dtype: torch.dtype) -> None:
        self.backend = backend
        self._spec, self._dtype = spec, dtype
        family = _FAMILIES[backend.value]
        self._call = _prefill.Call(family, spec.is_causal, spec.scale, spec.window_left, False)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x if _prefill.layout("", x) is None else _copied(x) for x in (q, k, v))
        if _prefill.apart(self._call.family, self._spec.is_causal, k, v):
            k, v = _copied(k), _copied(v)
        return _prefill.attend(self._call, q, k, v)[0]

    @property
    def plan_key(self) -> Hashable:
        return self.backend, self._spec, self._dtype

    def plan(self, metadata: AttentionMetadata, state: _paged.Plan | None) -> _paged.Plan:
        plan = state or _paged.Plan(self._spec, self._dtype, metadata)
        plan.update(metadata)
        return plan

    def run_paged(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, plan: Any = None
    ) -> Tensor:
        out: Tensor = plan.run(q, k, v)
        return out


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
