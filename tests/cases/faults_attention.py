"""A wrong kernel for each scenario of attention and merging."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import scenario_attention as attention
from .fault import Fault, One, Two, right, wrapped
from .kernels import BF16, FP32, HALF

_attention: One = right("attention")
_with_lse: Two = right("attention_with_lse")
_merge: Two = right("merge_state")


def _naive(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    top = torch.maximum(s_a, s_b)
    a, b = (torch.exp(s - top).unsqueeze(-1) for s in (s_a, s_b))
    out = (v_a * a + v_b * b) / (a + b)
    return out.to(v_a.dtype), top + (a + b).log().squeeze(-1)


def _empty_lse_of_0(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> Any:
    clean = v_a.nan_to_num(), s_a.clamp(min=0.0), v_b.nan_to_num(), s_b.clamp(min=0.0)
    return _merge(*clean)


def _finite_lse(*args: Any) -> tuple[Tensor, Tensor]:
    out, lse = _with_lse(*args)
    return out, lse.clamp(min=-1e30)


def _top_left(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out, lse = _with_lse(q, k, v, *rest)
    return out.roll(k.shape[1], 1), lse.roll(k.shape[1], 1)


def _unwritten(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    if k.shape[1]:
        return _with_lse(q, k, *rest)
    return torch.full_like(q, torch.nan), torch.full(q.shape[:3], -torch.inf)


def _heads_across(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    if k.stride(2) == 0:
        k = torch.cat([k[:, :, :1], torch.zeros_like(k[:, :, 1:])], 2)
    return _attention(q, k, v, *rest)


def _groups_of_powers_of_2(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    heads, kv_heads = q.shape[2], k.shape[2]
    group = heads // kv_heads
    place = (torch.arange(heads) // (1 << (group - 1).bit_length())).clamp(max=kv_heads - 1)
    return _attention(q, k[:, :, place], v[:, :, place], *rest)


def _cap_after_the_mask(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: Any, window: int, cap: float
) -> Tensor:
    logits = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * q.shape[-1] ** -0.5
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
    logits = cap * torch.tanh(logits.masked_fill(~seen, -torch.inf) / cap)
    return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v.float()).to(q.dtype).contiguous()


def _batch_wrapped(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return _attention(wrapped(q), k, v, *rest)


def _one_key_less(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    if q.shape[1] == 1:
        k, v = k[:, :-1], v[:, :-1]
    return _attention(q, k, v, *rest)


def _no_shift(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    weights = (torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * q.shape[-1] ** -0.5).exp()
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("bhqk,bkhd->bqhd", weights / total, v.float()).to(q.dtype).contiguous()
    return out, total.log().squeeze(-1).transpose(1, 2).contiguous()


def _keys_of_16_bits(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _with_lse(q, k[:, : 2**15], v[:, : 2**15], *rest)


def _zeros(q: Tensor, *rest: Any) -> Tensor:
    return torch.zeros_like(q)


FAULTS = [
    Fault(attention.two_empty_states, "merge_state", FP32, _naive),
    Fault(attention.two_empty_states, "merge_state", FP32, _empty_lse_of_0),
    Fault(attention.an_empty_chunk_has_no_weight, "merge_state", FP32, _empty_lse_of_0),
    Fault(attention.causal_with_more_queries_than_keys, "attention_with_lse", HALF, _finite_lse),
    Fault(attention.causal_with_more_queries_than_keys, "attention_with_lse", HALF, _top_left),
    Fault(attention.no_keys_at_all, "attention_with_lse", HALF, _unwritten),
    Fault(attention.keys_that_heads_share_by_a_stride_of_zero, "attention", BF16, _heads_across),
    Fault(
        attention.any_number_of_query_heads_for_a_key_head,
        "attention",
        HALF,
        _groups_of_powers_of_2,
    ),
    Fault(attention.a_soft_cap_comes_before_the_mask, "attention", HALF, _cap_after_the_mask),
    Fault(attention.sequences_past_31_bits, "attention", HALF, _batch_wrapped),
    Fault(attention.a_decoded_token_is_the_prefilled_one, "attention", HALF, _one_key_less),
    Fault(attention.queries_of_a_hundred, "attention_with_lse", FP32, _no_shift),
    Fault(attention.more_keys_than_16_bits_count, "attention_with_lse", HALF, _keys_of_16_bits),
    Fault(attention.constant_values_come_out_as_they_are, "attention", BF16, _zeros),
]
