"""sgl-kernel's rotary_embedding, in place; it takes the distance of heads in k from q."""

from torch import Tensor

from torch_ops import limits

from . import _rope

__all__ = ["apply_rope_", "supports"]


def supports(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> str | None:
    reason = _rope.refusal(q, k, cos_sin_cache, positions)
    if reason is None and q.stride(2) != 1:
        reason = limits.strides("q", q, "1 for the last axis")
    if reason is None and (k.stride(2) != 1 or (k.shape[1] > 1 and k.stride(1) != q.stride(1))):
        reason = limits.strides("k", k, f"{q.stride()[1:]} for the last two axes, as q")
    return reason


def apply_rope_(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> None:
    _rope.rotate(q, k, cos_sin_cache, positions, is_neox)
