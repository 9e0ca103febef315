"""apply_rope_append_paged_kv_: rotate, and write keys and values into a paged cache, at once."""

from __future__ import annotations

from torch import Tensor

from torch_ops import checks
from torch_ops.contracts import RopeCacheContract
from torch_ops.declarations import _append, _rope
from torch_ops.declarations.append_paged_kv_ import append_paged_kv_
from torch_ops.declarations.apply_rope import apply_rope
from torch_ops.declare import op

_OP = "apply_rope_append_paged_kv_"
_rotate, _write = apply_rope.reference, append_paged_kv_.reference


@op(
    contract=RopeCacheContract(batch_invariant=True),
    mutates=("q", "k_cache", "v_cache"),
)
def apply_rope_append_paged_kv_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    is_neox: bool = True,
) -> None:
    """Rotate queries in place and keys on their way into a paged cache, bit for bit as two ops.

    They are ``apply_rope`` and, with what it makes of ``k``, ``append_paged_kv_``. A decoding step
    does both in each layer and needs rotated keys nowhere but in the cache.

    Args:
        q: ``[T, H, D]`` float16, bfloat16, float32 or float64, any strides; overwritten.
        k: ``[T, K, D]``, dtype and device of ``q``; read, not rotated where it is.
        v: ``[T, K, Dv]``, as ``k``.
        cos_sin_cache: ``[max_position, rotary_dim]`` float32, cosines then sines.
        positions: ``[T]`` int32 or int64, each in ``[0, max_position)``: a precondition, checked
            in ``torch_ops.debug()`` alone.
        k_cache: ``[P, page_size, K, D]``, dtype and device of ``q``, any strides; written.
        v_cache: ``[P, page_size, K, Dv]``, as ``k_cache``; what is written shares no memory.
        slot_mapping: ``[T]`` int64, each below P * page_size: a precondition, checked in
            ``torch_ops.debug()`` alone. Of a token with a negative one the query is rotated, and
            nothing is written into the caches. Of several tokens with one slot any may be found
            there afterwards.
        is_neox: Pair element i with i + rotary_dim / 2; otherwise 2i with 2i + 1.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, or arguments overlap.
        NoBackwardError: an input requires grad.
    """
    rotated_q, rotated_k = _rotate(q, k, cos_sin_cache, positions, is_neox)
    q.copy_(rotated_q)
    _write(rotated_k, v, k_cache, v_cache, slot_mapping)


@apply_rope_append_paged_kv_.check
def _check(
    q: Tensor, k: Tensor, v: Tensor, cos_sin_cache: Tensor, positions: Tensor, k_cache: Tensor,
    v_cache: Tensor, slot_mapping: Tensor, is_neox: bool = True,
) -> None:  # fmt: skip
    _rope.check(_OP, q, k, cos_sin_cache, positions)
    checks.no_self_overlap(_OP, "q", q)
    _append.check(_OP, k, v, k_cache, v_cache, slot_mapping)


@apply_rope_append_paged_kv_.memory_check
def _memory_check(
    q: Tensor, k: Tensor, v: Tensor, cos_sin_cache: Tensor, positions: Tensor, k_cache: Tensor,
    v_cache: Tensor, slot_mapping: Tensor, is_neox: bool = True,
) -> None:  # fmt: skip
    indices = cos_sin_cache, positions, slot_mapping
    pages_apart = checks.apart(k_cache, v_cache, q, k, v, *indices)
    if pages_apart and checks.apart(q, k_cache, k, v, *indices):
        return
    checks.no_overlap(_OP, "q", q, "k", k)  # parts of one projection, mostly
    checks.no_overlap(_OP, "q", q, "v", v)
    if pages_apart and checks.apart(q, k_cache, *indices):
        return
    _append.check_memory(_OP, k, v, k_cache, v_cache, slot_mapping)
    for name, written in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        checks.no_overlap(_OP, name, written, "positions", positions)
        checks.no_overlap(_OP, name, written, "cos_sin_cache", cos_sin_cache)
    for name, other in (("k_cache", k_cache), ("v_cache", v_cache), ("slot_mapping", slot_mapping)):
        checks.no_overlap(_OP, "q", q, name, other)


@apply_rope_append_paged_kv_.debug_check
def _debug_check(
    q: Tensor, k: Tensor, v: Tensor, cos_sin_cache: Tensor, positions: Tensor, k_cache: Tensor,
    v_cache: Tensor, slot_mapping: Tensor, is_neox: bool = True,
) -> None:  # fmt: skip
    _rope.check_positions(_OP, cos_sin_cache, positions)
    _append.check_slots(_OP, k_cache, slot_mapping)


@apply_rope_append_paged_kv_.fake
def _fake(
    q: Tensor, k: Tensor, v: Tensor, cos_sin_cache: Tensor, positions: Tensor, k_cache: Tensor,
    v_cache: Tensor, slot_mapping: Tensor, is_neox: bool = True,
) -> None:  # fmt: skip
    return None
