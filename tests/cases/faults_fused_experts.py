"""A wrong kernel for each scenario of running experts."""

from __future__ import annotations

import torch
from torch import Tensor

from . import scenario_fused_experts as experts
from .fault import Fault, One, right, wrapped
from .kernels import BF16, FP32, HALF

_run: One = right("fused_experts")


def _minus_one_is_last(x: Tensor, first: Tensor, second: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return _run(x, first, second, w, ids % second.shape[0])


def _offset_wraps(x: Tensor, first: Tensor, second: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return _run(wrapped(x), first, second, w, ids)


def _chunk_too_small(x: Tensor, first: Tensor, second: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return _run(x, first, second, w, ids) * (torch.arange(len(x)) < 2**15).unsqueeze(1)


def _flat_ids(x: Tensor, first: Tensor, second: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return _run(x, first, second, w, ids.flatten()[: len(x), None].expand(ids.shape))


def _divides(x: Tensor, first: Tensor, second: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return _run(x, first, second, w, ids) * (len(x) // len(x))


_sort = right("moe_align_block_size")


def _only_token_0(ids: Tensor, experts: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    order, owners, total = _sort(ids, experts, size)
    return order.masked_fill(order > 0, ids.numel()), owners, total


def _wraps(ids: Tensor, experts: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = _sort(ids % experts, experts, size)
    return found


FAULTS = [
    Fault(experts.all_of_one_expert, "moe_align_block_size", FP32, _only_token_0),
    Fault(experts.five_experts_and_none, "moe_align_block_size", FP32, _wraps),
    Fault(experts.experts_of_nobody_and_tokens_of_none, "fused_experts", HALF, _minus_one_is_last),
    Fault(experts.the_last_token_of_many, "fused_experts", HALF, _offset_wraps),
    Fault(experts.more_than_32768_tokens, "fused_experts", BF16, _chunk_too_small),
    Fault(experts.several_experts_of_several_tokens, "fused_experts", HALF, _flat_ids),
    Fault(experts.no_tokens, "fused_experts", HALF, _divides),
]
