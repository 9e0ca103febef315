"""apply_rope: rotary position embedding of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ops.contracts import RopeContract
from torch_ops.declarations import _rope
from torch_ops.declare import op
from torch_ops.training import Run, Saved


@op(contract=RopeContract(batch_invariant=True))
def apply_rope(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of elements of queries and keys by the angle of their position.

    cos, sin = cos_sin_cache[positions].split(rotary_dim / 2, -1)
    (a, b) -> (a * cos - b * sin, b * cos + a * sin)

    Args:
        q: ``[T, H, D]`` float16, bfloat16, float32 or float64, any strides.
        k: ``[T, K, D]``, dtype and device of ``q``.
        cos_sin_cache: ``[max_position, rotary_dim]`` float32, cosines in the first half of a row
            and sines in the second; rotary_dim is even and at most D.
        positions: ``[T]`` int32 or int64, each in ``[0, max_position)``: a precondition, checked
            in ``torch_ops.debug()`` alone.
        is_neox: Pair element i with i + rotary_dim / 2; otherwise 2i with 2i + 1.

    Returns:
        ``(q, k)`` rotated, shapes and dtype of the inputs, contiguous. Elements from rotary_dim
        on are copied. Rotated in float32 (float64 for float64 input), rounded once. Gradients of
        q and k, of any order, are those of the results rotated back, by the same op.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree.
        NoBackwardError: ``cos_sin_cache`` requires grad; q and k have gradients of any order.

    Source: Su et al., RoFormer (arXiv 2104.09864).
    """
    angles = cos_sin_cache.index_select(0, positions)
    return _rope.rotate(q, angles, is_neox), _rope.rotate(k, angles, is_neox)


apply_rope.batch("q", "k", "positions", merge=True)


@apply_rope.check
def _check(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> None:
    _rope.check("apply_rope", q, k, cos_sin_cache, positions)


@apply_rope.debug_check
def _debug_check(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> None:
    _rope.check_positions("apply_rope", cos_sin_cache, positions)


@apply_rope.fake
def _fake(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@apply_rope.backward(
    "apply_rope", saves=("cos_sin_cache", "positions"), constants=("cos_sin_cache", "positions")
)
def _gradients(
    run: Run, grads: Sequence[Tensor], saved: Saved
) -> tuple[Tensor, Tensor, None, None]:
    positions = saved["positions"]
    angles = _rope.opposite(saved["cos_sin_cache"], positions)
    places = torch.arange(angles.shape[0], device=positions.device, dtype=positions.dtype)
    # Contiguous: a backend of foreign kernels took the layout of q and k, not that of gradients.
    q, k = (grad.contiguous() for grad in grads)
    return (*run(q, k, angles, places, saved["is_neox"]), None, None)
