"""append_paged_kv_: write keys and values into the slots of a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.contracts import CacheContract
from torch_ops.declarations import _append
from torch_ops.declare import op

_OP = "append_paged_kv_"


@op(contract=CacheContract(batch_invariant=True), mutates=("k_cache", "v_cache"))
def append_paged_kv_(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write each token's keys and values into its slot of a paged cache.

    k_cache[slot_mapping[t] // page_size, slot_mapping[t] % page_size] = k[t], and v likewise.

    Args:
        k: ``[T, K, D]`` float16, bfloat16, float32 or float64, any strides.
        v: ``[T, K, Dv]``, dtype and device of ``k``.
        k_cache: ``[P, page_size, K, D]``, dtype and device of ``k``, any strides; written.
        v_cache: ``[P, page_size, K, Dv]``, as ``k_cache``; shares no memory with it.
        slot_mapping: ``[T]`` int64, each below P * page_size: a precondition, checked in
            ``torch_ops.debug()`` alone. A negative one skips its token. Of several tokens with one
            slot any may be found there afterwards.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, or arguments overlap.
        NoBackwardError: an input requires grad.

    Source: Kwon et al., PagedAttention (arXiv 2309.06180).
    """
    if slot_mapping.shape[0] == 0 or k_cache.shape[0] == 0:
        return
    page_size = k_cache.shape[1]
    wanted = slot_mapping >= 0
    # A skipped token repeats the first that isn't, without a shape that depends on data.
    source = torch.where(
        wanted, torch.arange(wanted.shape[0], device=k.device), wanted.int().argmax()
    )
    slot = slot_mapping[source].clamp(min=0)
    page, offset = slot // page_size, slot % page_size
    for rows, cache in ((k, k_cache), (v, v_cache)):
        kept = cache[page, offset]  # where all are skipped, the slot is given back what it held
        cache[page, offset] = torch.where(wanted.any(), rows[source], kept)


@append_paged_kv_.check
def _check(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    _append.check(_OP, k, v, k_cache, v_cache, slot_mapping)
    _append.check_memory(_OP, k, v, k_cache, v_cache, slot_mapping)


@append_paged_kv_.debug_check
def _debug_check(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    _append.check_slots(_OP, k_cache, slot_mapping)


@append_paged_kv_.fake
def _fake(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    return None
