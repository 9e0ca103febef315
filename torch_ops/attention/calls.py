"""Layers on the functions of ops: what most backends need to serve ragged and paged calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_ops.attention.metadata import Tables
from torch_ops.attention.prepared import AttentionSpec, PreparedAttention

__all__ = ["PreparedCalls"]


class PreparedCalls(PreparedAttention):
    """Serves ragged and paged calls by functions of the ops' signatures.

    Attributes:
        spec: What the layer asks for.
    """

    varlen_attention: Callable[..., Tensor]
    paged_prefill: Callable[..., Tensor]
    paged_decode: Callable[..., Tensor]

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def run_ragged(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, plan: Any = None
    ) -> Tensor:
        spec, bounds = self.spec, (tables.qo_indptr, tables.kv_indptr)
        return type(self).varlen_attention(
            q, k, v, *bounds, tables.max_qo_len, tables.max_kv_len, spec.is_causal, spec.scale,
            spec.window_left, spec.logits_soft_cap,
        )  # fmt: skip

    def run_paged(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, plan: Any = None
    ) -> Tensor:
        spec = self.spec
        table = tables.kv_indptr, tables.kv_indices, tables.kv_last_page_len
        numbers = spec.scale, spec.window_left, spec.logits_soft_cap
        if tables.decodes:  # the last query sees all keys, causal or not
            return type(self).paged_decode(q, k, v, *table, *numbers)
        bounds = tables.qo_indptr, *table
        return type(self).paged_prefill(q, k, v, *bounds, spec.is_causal, *numbers)
