"""The norms of decoder models on ``torch_ops.rms_norm`` and ``torch_ops.gemma_rms_norm``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; shares the original's weight."""

    def __init__(self, weight: nn.Parameter, eps: float, op: str = "rms_norm") -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.op = op

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize ``hidden_states``, ``[..., hidden]``.

        A weight of another dtype widens the result, as the models have it, but for Gemma's norm.
        """
        ops = torch.ops.torch_ops
        if self.op == "gemma_rms_norm":
            out: Tensor = ops.gemma_rms_norm(hidden_states, self.weight, self.eps)
        elif self.weight.dtype == hidden_states.dtype:
            out = ops.rms_norm(hidden_states, self.weight, self.eps)
        else:
            out = self.weight * ops.rms_norm(hidden_states, None, self.eps)
        return out

    def extra_repr(self) -> str:
        """Shape, epsilon and op, for ``print(model)``."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}, op={self.op}"
