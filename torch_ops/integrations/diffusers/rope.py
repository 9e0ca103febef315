"""Rotary embeddings of diffusion transformers as a table, for ``torch_ops.apply_rope``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["RotaryTable", "as_table", "rotate"]


class RotaryTable(nn.Module):
    """Makes one table of a forward, instead of one in each of its attention modules."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take what the original takes, and return what `as_table` does."""
        return as_table(self.original(*args, **kwargs))


def as_table(rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Bring an embedding of neighboring elements into the form that ``apply_rope`` takes.

    Nothing is computed, so the rotation is the same: pairs (2i, 2i + 1), in float32, also where
    ``to()`` has rounded what a model keeps.

    Args:
        rotary: Cosines and sines of each token, ``[..., D]`` with every number twice; or
            complex numbers ``[S, D / 2]`` of the image and of the text in front of it; or what this
            function returns.

    Returns:
        ``(table [S, D] float32, positions [S] int64)``, which are the rows in order.
    """
    first, second = rotary
    if second.dtype == torch.int64:
        return rotary
    if first.is_complex():
        joint = torch.cat((second, first))
        cos, sin = joint.real, joint.imag
    else:
        cos, sin = (x.flatten(0, -2)[:, ::2] for x in rotary)
    made = torch.cat((cos, sin), dim=-1).float()
    return made, torch.arange(made.shape[0], device=made.device)


def rotate(q: Tensor, k: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Rotate ``[B, S, H, D]`` queries and keys by what `as_table` takes."""
    made, positions = as_table(rotary)
    batch, length = q.shape[:2]
    if made.shape[0] != length:
        raise ValueError(
            f"image_rotary_emb: received one of {made.shape[0]} tokens, accepted: of all {length}"
        )
    if batch > 1:
        positions = positions.repeat(batch)
    flat = (x.flatten(0, 1) for x in (q, k))
    q, k = torch.ops.torch_ops.apply_rope(*flat, made, positions, is_neox=False)
    return q.unflatten(0, (batch, length)), k.unflatten(0, (batch, length))
