"""The output layer of language models."""

from __future__ import annotations

from torch import Tensor, nn

from torch_ops.integrations.transformers.projection import linear

__all__ = ["OutputLinear"]


class OutputLinear(nn.Linear):
    """A `torch.nn.Linear` whose product with one row is fast; shares the original's parameters."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__(original.in_features, original.out_features, bias=False, device="meta")
        self.weight = original.weight
        self.bias = original.bias

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to ``input``, ``[..., in]``."""
        return linear(input, self.weight, self.bias)
