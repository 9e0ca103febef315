"""The norms of diffusion transformers on ``torch_ops.layer_norm`` and ``torch_ops.rms_norm``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LayerNorm", "RMSNorm", "WideningRMSNorm"]


class LayerNorm(nn.LayerNorm):
    """Stands in for a norm by mean and variance over the last dimension; shares its parameters.

    Everything is computed in float32 and rounded once, whatever the dtype of the parameters.
    """

    def __init__(self, original: nn.LayerNorm) -> None:
        super().__init__(
            original.normalized_shape, original.eps, elementwise_affine=False, device="meta"
        )
        self.elementwise_affine = original.elementwise_affine
        self.weight = original.weight
        self.bias = original.bias

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``, ``[..., hidden]``."""
        out: Tensor = torch.ops.torch_ops.layer_norm(input, self.weight, self.bias, self.eps)
        return out


class RMSNorm(nn.RMSNorm):
    """Stands in for a root-mean-square norm over the last dimension; shares its weight."""

    eps: float

    def __init__(self, original: Any) -> None:
        shape = getattr(original, "normalized_shape", None) or original.dim
        super().__init__(shape, original.eps, elementwise_affine=False, device="meta")
        self.elementwise_affine = original.elementwise_affine
        self.weight = original.weight

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``, ``[..., hidden]``."""
        out: Tensor = torch.ops.torch_ops.rms_norm(x, self.weight, self.eps)
        return out


class WideningRMSNorm(RMSNorm):
    """The norm of diffusers itself: the result has the dtype of the weight, where there is one."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``, ``[..., hidden]``."""
        if self.weight is None or self.weight.dtype == x.dtype:
            return super().forward(x)
        wide: Tensor = torch.ops.torch_ops.rms_norm(x.float(), None, self.eps)
        return wide.to(self.weight.dtype) * self.weight
