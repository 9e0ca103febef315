"""apply_rope_append_paged_kv_ in Triton."""

from torch import Tensor

from ._launch import refuses_bfloat16
from ._rotary_append import rotate_and_append

__all__ = ["apply_rope_append_paged_kv_", "supports"]


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
    rotate_and_append(q, k, v, cos_sin_cache, positions, k_cache, v_cache, slot_mapping, is_neox)


supports = refuses_bfloat16(apply_rope_append_paged_kv_)
