"""The compiled apply_rope, copied back over its inputs."""

from torch import Tensor

from .apply_rope import apply_rope, supports

__all__ = ["apply_rope_", "supports"]


def apply_rope_(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> None:
    rotated_q, rotated_k = apply_rope(q, k, cos_sin_cache, positions, is_neox)
    q.copy_(rotated_q)
    k.copy_(rotated_k)
