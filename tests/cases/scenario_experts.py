"""Rows of choosing, sorting and running experts: what each kernel has to get right."""

from __future__ import annotations

import math

import torch

from .kernels import FP32, HALF, Kernels, require, same
from .scenario import scenario

ROUTE = ("topk_softmax",)


@scenario("E1", ops=ROUTE, dtypes=[HALF, FP32])
def rows_of_nan(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """Whole rows, and single logits of others."""
    logits = kernels.normal(4, 6, dtype=dtype)
    logits[0], logits[2, 3], logits[3, 1:] = math.nan, math.nan, math.nan
    _, ids = kernels.proven(op, logits, 2, True)
    require("E1: one expert twice", (ids[:, 0] != ids[:, 1]).all())
    require("E1: no such expert", ((ids >= 0) & (ids < 6)).all())


@scenario("E2", ops=ROUTE, dtypes=[FP32])
def weights_of_8_of_128(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    logits = kernels.normal(33, 128, dtype=dtype)
    weights, ids = kernels.proven(op, logits, 8, False)
    share = logits.double().softmax(-1).gather(-1, ids.long())
    require("E2", ((weights - share).abs() <= 2**-18 * share).all())


@scenario("E3", ops=ROUTE, dtypes=[HALF])
def an_expert_past_256(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    logits = kernels.normal(5, 512, dtype=dtype)
    logits[:, 338] = 20
    _, ids = kernels.proven(op, logits, 4, False)
    same("E3", ids[:, 0], torch.full_like(ids[:, 0], 338))
