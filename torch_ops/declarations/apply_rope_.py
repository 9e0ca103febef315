"""apply_rope_: the same, written over queries and keys."""

from __future__ import annotations

from torch import Tensor

from torch_ops import checks
from torch_ops.contracts import RopeContract
from torch_ops.declarations import _rope
from torch_ops.declarations.apply_rope import apply_rope
from torch_ops.declare import op

_functional = apply_rope.reference


@op(contract=RopeContract(batch_invariant=True), mutates=("q", "k"))
def apply_rope_(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> None:
    """Rotate queries and keys in place; see ``apply_rope``.

    Args:
        q: ``[T, H, D]`` float16, bfloat16, float32 or float64, any strides; overwritten.
        k: ``[T, K, D]``, dtype and device of ``q``, overwritten; shares no memory with ``q``.
        cos_sin_cache: ``[max_position, rotary_dim]`` float32, cosines then sines.
        positions: ``[T]`` int32 or int64, each in ``[0, max_position)``: a precondition, checked
            in ``torch_ops.debug()`` alone.
        is_neox: Pair element i with i + rotary_dim / 2; otherwise 2i with 2i + 1.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, or arguments overlap.
        NoBackwardError: an input requires grad.
    """
    rotated_q, rotated_k = _functional(q, k, cos_sin_cache, positions, is_neox)
    q.copy_(rotated_q)
    k.copy_(rotated_k)


apply_rope_.batch("q", "k", "positions", merge=True)


@apply_rope_.check
def _check(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> None:
    _rope.check("apply_rope_", q, k, cos_sin_cache, positions)
    checks.no_self_overlap("apply_rope_", "q", q)
    checks.no_self_overlap("apply_rope_", "k", k)


@apply_rope_.memory_check
def _memory_check(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> None:
    name = "apply_rope_"
    if checks.apart(q, k, cos_sin_cache, positions):
        return
    checks.no_overlap(name, "q", q, "k", k)
    for argument, tensor in (("q", q), ("k", k)):
        checks.no_overlap(name, argument, tensor, "positions", positions)
        checks.no_overlap(name, argument, tensor, "cos_sin_cache", cos_sin_cache)


@apply_rope_.debug_check
def _debug_check(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> None:
    _rope.check_positions("apply_rope_", cos_sin_cache, positions)


@apply_rope_.fake
def _fake(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
) -> None:
    return None
