"""A wrong kernel for each scenario of packed sequences, pages and caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import scenario_paged as paged
from .fault import Fault, One, Two, right
from .kernels import BF16

_packed: Two = right("varlen_attention_with_lse")
_decode: One = right("paged_decode")
_prefill: One = right("paged_prefill")
_latents: One = right("mla_decode")
_append: Any = right("append_paged_kv_")


def _empty_ones_are_left_out(
    q: Tensor, k: Tensor, v: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Sequences without keys aren't counted among those with queries."""
    kept = kv_indptr.unique()
    return _packed(q, k, v, qo_indptr[: len(kept)], kept, *rest)


def _full_last_page(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    indptr, indices, last, *numbers = rest
    return _decode(q, k, v, indptr, indices, torch.full_like(last, k.shape[1]), *numbers)


def _full_last_page_of_rows(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    rows, indptr, indices, last, *numbers = rest
    return _prefill(q, k, v, rows, indptr, indices, torch.full_like(last, k.shape[1]), *numbers)


def _page_of_16_bits(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    indptr, indices, *others = rest
    return _decode(q, k, v, indptr, indices % 2**16, *others)


def _latents_of_full_last_pages(*args: Any) -> Tensor:
    *others, last, scale = args
    return _latents(*others, torch.full_like(last, args[2].shape[1]), scale)


def _latents_of_page_of_16_bits(*args: Any) -> Tensor:
    *others, indices, last, scale = args
    return _latents(*others, indices % 2**16, last, scale)


def _slot_of_16_bits(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    caches = k_cache.clone(), v_cache.clone()
    _append(k, v, *caches, torch.where(slots < 0, slots, slots % 2**16))
    return caches


def _padding_in_slot_0(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    caches = k_cache.clone(), v_cache.clone()
    _append(k.flip(0), v.flip(0), *caches, slots.clamp(min=0).flip(0))
    caches[0][0, 0] = k[1]
    return caches


FAULTS = [
    Fault(
        paged.sequences_without_queries_or_keys,
        "varlen_attention_with_lse",
        BF16,
        _empty_ones_are_left_out,
    ),
    Fault(paged.unused_slots_hold_nan, "paged_decode", BF16, _full_last_page),
    Fault(paged.unused_slots_hold_nan, "paged_prefill", BF16, _full_last_page_of_rows),
    Fault(paged.pages_past_16_and_31_bits, "paged_decode", BF16, _page_of_16_bits),
    Fault(paged.latents_of_large_queries, "mla_decode", BF16, _latents_of_full_last_pages),
    Fault(paged.latents_past_16_and_31_bits, "mla_decode", BF16, _latents_of_page_of_16_bits),
    Fault(paged.slots_past_31_bits, "append_paged_kv_", BF16, _slot_of_16_bits),
    Fault(paged.caches_in_a_packed_buffer, "append_paged_kv_", BF16, _padding_in_slot_0),
]
