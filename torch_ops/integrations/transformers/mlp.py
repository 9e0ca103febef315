"""The gated feed-forward block of decoder models on ``torch_ops.*_and_mul``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_ops.integrations.transformers.projection import FusedLinears, run_linear

__all__ = ["GATES", "GatedMLP"]

# Activation module's type name -> op; each computes activation(gate) * up.
GATES = {
    "SiLUActivation": "silu_and_mul",
    "SiLU": "silu_and_mul",
    "GELUActivation": "gelu_and_mul",
    "GELUTanh": "gelu_tanh_and_mul",
}


class GatedMLP(FusedLinears):
    """``down(activation(gate(x)) * up(x))`` with gate and up as one product."""

    down_proj: nn.Module

    def __init__(self, original: Any, gated: tuple[str, ...], op: str) -> None:
        super().__init__(original, gated, ("down_proj",))
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to ``x``, ``[..., hidden]``."""
        gated = getattr(torch.ops.torch_ops, self.op)(self.project(x))
        return run_linear(self.down_proj, gated)

    def extra_repr(self) -> str:
        """The op, for ``print(model)``."""
        return f"op={self.op}"
