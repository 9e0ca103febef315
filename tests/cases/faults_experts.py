"""A wrong kernel for each scenario of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from . import scenario_experts as experts
from .fault import Fault, Two, right
from .kernels import FP32, HALF

_route: Two = right("topk_softmax")


def _first_expert_for_nan(
    logits: Tensor, k: int, renormalize: bool = False
) -> tuple[Tensor, Tensor]:
    weights, ids = _route(logits, k, renormalize)
    return weights, ids.masked_fill(logits.isnan().any(-1, keepdim=True), 0)


def _softmax_of_chosen(logits: Tensor, k: int, renormalize: bool = False) -> tuple[Tensor, Tensor]:
    return _route(logits, k, True)


def _expert_of_8_bits(logits: Tensor, k: int, renormalize: bool = False) -> tuple[Tensor, Tensor]:
    weights, ids = _route(logits, k, renormalize)
    return weights, torch.where(ids > 255, ids - 256, ids)


FAULTS = [
    Fault(experts.rows_of_nan, "topk_softmax", HALF, _first_expert_for_nan),
    Fault(experts.weights_of_8_of_128, "topk_softmax", FP32, _softmax_of_chosen),
    Fault(experts.an_expert_past_256, "topk_softmax", HALF, _expert_of_8_bits),
]
