"""Attention layers with prepared implementations, and overrides that swap all or none."""

from __future__ import annotations

from torch_ops.attention.backend import AttentionBackend
from torch_ops.attention.layer import Attention
from torch_ops.attention.metadata import AttentionMetadata
from torch_ops.attention.override import (
    OverrideReport,
    OverrideToken,
    apply_attention_backend_override,
    override_attention_backend,
    prepare_attention_backend_override,
)
from torch_ops.attention.prepared import AttentionSpec, PreparedAttention
from torch_ops.attention.selection import attention_state

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionSpec",
    "OverrideReport",
    "OverrideToken",
    "PreparedAttention",
    "apply_attention_backend_override",
    "attention_state",
    "override_attention_backend",
    "prepare_attention_backend_override",
]
