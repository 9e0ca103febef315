"""FlashInfer's apply_rope_pos_ids_cos_sin_cache, written over its inputs."""

from torch import Tensor

from . import _rope

__all__ = ["apply_rope_", "supports"]


def supports(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> str | None:
    return _rope.refusal(q, k, cos_sin_cache, positions, is_neox, True)


def apply_rope_(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> None:
    _rope.rotate(q, k, q, k, cos_sin_cache, positions, is_neox)
