"""FlashInfer's rotary embedding, and what it can't take.

Threads of one warp each rotate a vector of a head. A vector must lie in one half of the rotated
elements, and in place its other half must be read by the same warp before it is written.
"""

from __future__ import annotations

from torch import Tensor

from torch_ops import limits

from . import _modules

__all__ = ["refusal", "rotate"]

_OWN_KERNEL = (64, 128, 256, 512)
_WARP_FRACTIONS = (1, 2, 4, 8, 16, 32)
_BLOCKS = 65535


def refusal(
    q: Tensor, k: Tensor, cache: Tensor, positions: Tensor, is_neox: bool, in_place: bool
) -> str | None:
    """Give why these can't be rotated, or None."""
    if q.dtype not in limits.HALVES:
        return limits.unsupported("q", q, limits.HALVES)
    tokens, heads, head_dim = q.shape
    if q.numel() == 0 or k.numel() == 0:
        return None if not (tokens and head_dim) else "no heads (supported: at least one)"
    width = cache.shape[1]
    own = head_dim in _OWN_KERNEL
    vector = max(8, head_dim // 32) if own else 16
    step = 2 * vector if is_neox else vector
    if width % step or not width:
        pairing = "neox" if is_neox else "interleaved"
        return (
            f"rotary_dim {width} (supported for head_dim {head_dim}, {pairing}: "
            f"multiples of {step})"
        )
    if not (cache.is_contiguous() and positions.is_contiguous()) or cache.data_ptr() & 15:
        return (
            f"cos_sin_cache strides {cache.stride()}, positions strides {positions.stride()} "
            "(supported: contiguous, the cache aligned to 16 bytes)"
        )
    if not own and head_dim % 8:
        return f"head_dim {head_dim} (supported: multiples of 8)"
    if not own and in_place and is_neox and width // 16 not in _WARP_FRACTIONS:
        return (
            f"rotary_dim {width} in place (supported for head_dim {head_dim}: "
            f"{', '.join(str(16 * n) for n in _WARP_FRACTIONS[1:])})"
        )
    parts = 1 if own else 1 + -(-(head_dim - width) // width)
    most = _BLOCKS // parts
    if heads + k.shape[1] > most:
        return f"{heads + k.shape[1]} heads of q and k (supported: up to {most})"
    if cache.numel() > limits.OFFSETS and positions.element_size() == 4:
        return (
            f"cos_sin_cache of {cache.numel()} elements with int32 positions "
            f"(supported: up to {limits.OFFSETS}, or int64 positions)"
        )
    if q.is_contiguous() and k.is_contiguous() and not (q.data_ptr() | k.data_ptr()) & 15:
        return None
    return _layout("q", q) or _layout("k", k)


def _layout(name: str, x: Tensor) -> str | None:
    tokens, heads, last = x.stride()
    if last != 1 or (tokens | heads) & 7:
        return limits.strides(name, x, "1 for the last axis, multiples of 8 for the others")
    if x.data_ptr() & 15:
        return limits.misaligned(name, x, "16")
    return None


def rotate(
    q: Tensor,
    k: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    cache: Tensor,
    positions: Tensor,
    is_neox: bool,
) -> None:
    """Rotate from two tensors into two; they may be the same ones."""
    if q.numel():
        _modules.rope()(q, k, q_out, k_out, cache, positions, not is_neox)
