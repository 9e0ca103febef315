"""Attention layers; compiled when a layer is prepared."""

from __future__ import annotations

import torch
from torch import Tensor

import torch_ops_late
from torch_ops.attention import AttentionBackend, AttentionSpec, PreparedAttention
from torch_ops.declarations._attention import reference
from torch_ops.declarations.attention import attention as _declaration

attention = _declaration.reference


def prepare(spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> PreparedAttention:
    torch_ops_late.module("prefill")()
    return _Late(spec)


class _Late(PreparedAttention):
    backend = AttentionBackend("late")

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec = self.spec
        return reference(
            q, k, v, spec.is_causal, spec.scale, spec.window_left, spec.logits_soft_cap
        )[0]
