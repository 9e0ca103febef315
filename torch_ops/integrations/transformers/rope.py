"""Rotary embeddings as a table of all positions, for ``torch_ops.apply_rope``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_ops.integrations.transformers.masks import require

__all__ = ["RotaryTable", "refuse_positions", "table"]


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


def refuse_positions(positions: Tensor, max_position: int) -> None:
    """Raise where a position isn't in the table: at once in eager code, else when it runs.

    Raises:
        ValueError: there is such a position.
    """
    message = (
        f"position_ids: received some below 0 or from {max_position} on, accepted: 0 to "
        f"{max_position - 1}, by the model's max_position_embeddings, of padding too"
    )
    if positions.is_floating_point():
        raise ValueError(f"position_ids: received {positions.dtype}, accepted: torch.int64, int32")
    require(((positions >= 0) & (positions < max_position)).all(), message)


class RotaryTable(nn.Module):
    """Gives the attention modules what ``apply_rope`` takes instead of cosines and sines.

    There is a table for each type of layer, where the model has several. They stay float32 when
    the model changes its dtype. The original module follows every move of this one, so that it can
    be put back.
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        # In a tuple: as a child its buffers would be listed twice under new names.
        self._original = (original,)
        types = original.rope_type if isinstance(original.rope_type, dict) else ("",)
        for prefix in (f"{kind}_" if kind else "" for kind in types):
            inv_freq = getattr(original, f"{prefix}inv_freq")
            scaling = getattr(original, f"{prefix}attention_scaling")
            made = table(inv_freq, scaling, original.config.max_position_embeddings)
            self.register_buffer(f"{prefix}cos_sin_cache", made, persistent=False)

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str = ""
    ) -> tuple[Tensor, Tensor]:
        """Return the table and one position per token.

        Args:
            x: Hidden states, ``[B, S, hidden]``: only its shape is used.
            position_ids: ``[B, S]`` or ``[1, S]``.
            layer_type: Of which layers, in models with several types.

        Returns:
            ``(cos_sin_cache [max_position, rotary_dim], positions [B * S])``.

        Raises:
            ValueError: ``position_ids`` is of another shape.
        """
        batch, length = x.shape[:2]
        if position_ids.shape not in ((batch, length), (1, length)):
            raise ValueError(
                f"position_ids: received shape {list(position_ids.shape)}, accepted: "
                f"[{batch}, {length}] or [1, {length}]"
            )
        cache = getattr(self, f"{layer_type}_cos_sin_cache" if layer_type else "cos_sin_cache")
        return cache, position_ids.expand(batch, -1).reshape(-1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryTable:
        tables = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, cache in tables.items():
            moved: Tensor = getattr(self, name)
            if moved.dtype != cache.dtype:
                setattr(self, name, cache.to(moved.device))
        for original in self._original:
            original._apply(fn)
        return self

    def extra_repr(self) -> str:
        """Shapes of the tables, for ``print(model)``."""
        shapes = {tuple(cache.shape) for cache in self.buffers()}
        return ", ".join(f"positions={rows}, dim={width}" for rows, width in sorted(shapes))
