"""Rows of sorting by expert and of running experts: what each kernel has to get right."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .kernels import BF16, FP32, HALF, Kernels, judge, require, same
from .scenario import scenario

FUSED = ("fused_experts",)
ALIGN = ("moe_align_block_size",)


def _layer(kernels: Kernels, experts: int, hidden: int, width: int, dtype: torch.dtype) -> Tensor:
    """Both matrices of all experts, the one that leads down behind the other, transposed."""
    return kernels.normal(experts, 3 * width, hidden, dtype=dtype, seed=1) / 8


def _call(kernels: Kernels, x: Tensor, layer: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    width = layer.shape[1] // 3
    weights = kernels.normal(*ids.shape, seed=2).abs()
    return x, layer[:, : 2 * width], layer[:, 2 * width :].transpose(1, 2), weights, ids


def _ids(kernels: Kernels, *rows: tuple[int, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=kernels.device)


@scenario("E7", "E11", ops=FUSED, dtypes=[HALF])
def experts_of_nobody_and_tokens_of_none(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """Half of the ids are -1, some tokens have no expert, and an expert of nobody is NaN."""
    x, layer = kernels.normal(5, 24, dtype=dtype), _layer(kernels, 4, 24, 16, dtype)
    layer[3] = math.nan
    ids = _ids(kernels, (0, -1), (-1, -1), (-1, 2), (1, 0), (-1, -1))
    (out,) = kernels(op, *_call(kernels, x, layer, ids))
    require("E7: NaN of an expert that nobody chose", out.isfinite().all())
    same("E11", out[[1, 4]], torch.zeros_like(out[[1, 4]]))
    layer[3] = 0
    judge(op, _call(kernels, x, layer, ids), (out,))


@scenario("E9", ops=FUSED, dtypes=[HALF], gigabytes=60)
def the_last_token_of_many(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    hidden = 4096 if kernels.far >= 2**31 else 64
    tokens = kernels.far // hidden + 3
    x = kernels.full((tokens, hidden), 0.5, dtype)
    x[-1] = kernels.normal(hidden, dtype=dtype)
    layer, ids = _layer(kernels, 2, hidden, 16, dtype), _ids(kernels, (1,)).expand(tokens, 1)
    args = _call(kernels, x, layer, ids)
    (out,) = kernels(op, *args)
    judge(op, (x[-1:], *args[1:3], args[3][-1:], ids[-1:]), (out[-1:],))


@scenario("E10", ops=FUSED, dtypes=[BF16])
def more_than_32768_tokens(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    x, layer = kernels.normal(33_000, 8, dtype=dtype), _layer(kernels, 2, 8, 4, dtype)
    ids = (torch.arange(33_000, dtype=torch.int32, device=kernels.device) % 2).unsqueeze(1)
    kernels.proven(op, *_call(kernels, x, layer, ids))


@scenario("E13", ops=FUSED, dtypes=[HALF])
def several_experts_of_several_tokens(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    x, layer = kernels.normal(3, 16, dtype=dtype), _layer(kernels, 5, 16, 8, dtype)
    kernels.proven(op, *_call(kernels, x, layer, _ids(kernels, (0, 1), (3, 2), (4, 0))))


@scenario("E14", ops=FUSED, dtypes=[HALF])
def no_tokens(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    x, layer = kernels.normal(0, 16, dtype=dtype), _layer(kernels, 2, 16, 8, dtype)
    ids = torch.empty(0, 2, dtype=torch.int32, device=kernels.device)
    same("E14", kernels(op, *_call(kernels, x, layer, ids)), x)


@scenario("E5", ops=ALIGN, dtypes=[FP32])
def all_of_one_expert(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    order, owners, total = kernels(op, _ids(kernels, (0,), (0,), (0,), (0,)), 1, 16)
    same("E5", order[:8], _ids(kernels, (0, 1, 2, 3, 4, 4, 4, 4))[0])
    same("E5", (owners, total), (_ids(kernels, (0,))[0], _ids(kernels, (16,))[0]))


@scenario("E6", "E7", ops=ALIGN, dtypes=[FP32])
def five_experts_and_none(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """In blocks of four; half of the ids are -1."""
    ids = torch.arange(60, dtype=torch.int32, device=kernels.device).view(30, 2) % 5
    kernels.proven(op, ids, 5, 4)
    ids[:, 1] = -1
    _, owners, total = kernels.proven(op, ids, 5, 4)
    require("E7: more than the 30 that are left, in whole blocks", total.item() == 5 * 8)
    require("E7: a block of no expert", (owners[: 5 * 2] >= 0).all())
