"""Mixtures of experts on ``torch_ops.topk_softmax`` and ``torch_ops.fused_experts``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_ops.integrations.transformers.projection import watched

__all__ = ["SparseExperts"]


class SparseExperts(nn.Module):
    """Sends each token to its experts and adds their results; holds the original's parts.

    The router stays the module that it was, since transformers records its logits by its class. It
    runs where it is watched or was replaced, as the experts do; elsewhere their weights are read.
    """

    shared_expert: nn.Module
    shared_expert_gate: nn.Module

    def __init__(self, original: Any) -> None:
        super().__init__()
        for name, child in original.named_children():
            self.add_module(name, child)
        self.top_k = int(original.gate.top_k)
        self.renormalize = bool(getattr(original.gate, "norm_topk_prob", True))
        self.shared = hasattr(original, "shared_expert")
        self.jitter = float(getattr(original, "jitter_noise", 0.0))
        self._types = type(original.gate), type(original.experts)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the block to ``hidden_states``, ``[..., hidden]``."""
        if self.jitter and self.training:
            raise ValueError(
                f"router_jitter_noise: received {self.jitter}, accepted: 0.0; call eval() on the "
                "model"
            )
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, ids = self._route(rows)
        experts: Any = self.experts
        if watched(experts) or type(experts) is not self._types[1]:
            out: Tensor = experts(rows, ids.long(), weights)
        else:
            out = torch.ops.torch_ops.fused_experts(
                rows, experts.gate_up_proj, experts.down_proj, weights, ids
            )
        if self.shared:
            out = out + torch.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        return out.reshape(hidden_states.shape)

    def _route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        gate: Any = self.gate
        if watched(gate) or type(gate) is not self._types[0]:
            _, weights, ids = gate(rows)
            return weights.float(), ids.int()
        logits = functional.linear(rows, gate.weight)
        weights, ids = torch.ops.torch_ops.topk_softmax(logits, self.top_k, self.renormalize)
        return weights, ids

    def extra_repr(self) -> str:
        """The router's numbers, for ``print(model)``."""
        return f"top_k={self.top_k}, renormalize={self.renormalize}"
