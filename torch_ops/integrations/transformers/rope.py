"""Rotary embeddings as a table of all positions, for ``torch_ops.apply_rope``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["RotaryTable", "table"]


def table(inv_freq: Tensor, scaling: float, max_position: int) -> Tensor:
    """Cosines, then sines, of every position.

    Args:
        inv_freq: Inverse frequencies, ``[rotary_dim / 2]``.
        scaling: Factor on both.
        max_position: Number of positions.

    Returns:
        ``[max_position, rotary_dim]`` float32.
    """
    positions = torch.arange(max_position, device=inv_freq.device, dtype=torch.float32)
    angles = positions[:, None] * inv_freq.to(torch.float32)
    return torch.cat((angles.cos() * scaling, angles.sin() * scaling), dim=-1)


class RotaryTable(nn.Module):
    """Gives the attention modules what ``apply_rope`` takes instead of cosines and sines.

    The table stays float32 when the model changes its dtype. The original module follows every
    move of this one, so that it can be put back.
    """

    cos_sin_cache: Tensor

    def __init__(self, original: nn.Module, cos_sin_cache: Tensor) -> None:
        super().__init__()
        # In a tuple: as a child its buffers would be listed twice under new names.
        self._original = (original,)
        self.register_buffer("cos_sin_cache", cos_sin_cache, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the table and one position per token.

        Args:
            x: Hidden states, ``[B, S, hidden]``: only its shape is used.
            position_ids: ``[B, S]`` or ``[1, S]``.

        Returns:
            ``(cos_sin_cache [max_position, rotary_dim], positions [B * S])``.
        """
        return self.cos_sin_cache, position_ids.expand(x.shape[0], -1).reshape(-1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryTable:
        cache = self.cos_sin_cache
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.cos_sin_cache.dtype != cache.dtype:
            self.cos_sin_cache = cache.to(self.cos_sin_cache.device)
        for original in self._original:
            original._apply(fn)
        return self

    def extra_repr(self) -> str:
        """Shape of the table, for ``print(model)``."""
        return f"positions={self.cos_sin_cache.shape[0]}, dim={self.cos_sin_cache.shape[1]}"
