"""The norms of decoder models on ``torch_ops.rms_norm``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; shares the original's weight."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize ``hidden_states``, ``[..., hidden]``."""
        out: Tensor = torch.ops.torch_ops.rms_norm(hidden_states, self.weight, self.eps)
        return out

    def extra_repr(self) -> str:
        """Shape and epsilon, for ``print(model)``."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}"
