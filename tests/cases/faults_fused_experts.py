"""A wrong kernel for each scenario of running experts."""

from __future__ import annotations

import torch
from torch import Tensor

from . import scenario_fused_experts as experts
from .fault import Fault, One, right, wrapped
from .kernels import BF16, HALF

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


FAULTS = [
    Fault(experts.experts_of_nobody_and_tokens_of_none, "fused_experts", HALF, _minus_one_is_last),
    Fault(experts.the_last_token_of_many, "fused_experts", HALF, _offset_wraps),
    Fault(experts.more_than_32768_tokens, "fused_experts", BF16, _chunk_too_small),
    Fault(experts.several_experts_of_several_tokens, "fused_experts", HALF, _flat_ids),
    Fault(experts.no_tokens, "fused_experts", HALF, _divides),
]
