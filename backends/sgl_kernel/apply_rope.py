"""sgl-kernel's rotary_embedding on copies: it has no other form."""

import torch
from torch import Tensor

from . import _rope

__all__ = ["apply_rope", "supports"]


def supports(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> str | None:
    return _rope.refusal(q, k, cos_sin_cache, positions)


def apply_rope(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> tuple[Tensor, Tensor]:
    q_out = q.clone(memory_format=torch.contiguous_format)
    k_out = k.clone(memory_format=torch.contiguous_format)
    _rope.rotate(q_out, k_out, cos_sin_cache, positions, is_neox)
    return q_out, k_out
