"""append_paged_kv_ in Triton."""

from torch import Tensor

from ._launch import refuses_bfloat16
from ._paged_append import write

__all__ = ["append_paged_kv_", "supports"]


def append_paged_kv_(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    write(k, v, k_cache, v_cache, slot_mapping)


supports = refuses_bfloat16(append_paged_kv_)
