"""FlashInfer's apply_rope_pos_ids_cos_sin_cache, into fresh tensors."""

import torch
from torch import Tensor

from . import _rope

__all__ = ["apply_rope", "supports"]


def supports(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> str | None:
    return _rope.refusal(q, k, cos_sin_cache, positions, is_neox, False)


def apply_rope(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> tuple[Tensor, Tensor]:
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_out = torch.empty_like(k, memory_format=torch.contiguous_format)
    _rope.rotate(q, k, q_out, k_out, cos_sin_cache, positions, is_neox)
    return q_out, k_out
