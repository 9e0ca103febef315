"""Chooses experts: the largest logits of a row, one after another, and their softmax."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ._launch import INTERPRETED, INTERPRETED_TILE, Variant, kernel, remember
from ._rows import power_of_two

__all__ = ["route"]

_TILE, _SHORT = 128, 256  # logits of a program that takes several rows, and short ones
_EACH = 8  # logits of a thread, where a row is longer than a warp's


@kernel()
def _route(
    logits: tl.tensor, weights: tl.tensor, ids: tl.tensor,
    rows: tl.int64, row_step: tl.int64, column_step: tl.int64,
    EXPERTS: tl.constexpr, K: tl.constexpr, RENORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Choose the experts of ROWS tokens; the chosen are crossed out, one at a time."""
    wide: tl.constexpr = tl.float64 if logits.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_E)[None, :]
    inside = (row < rows) & (column < EXPERTS)
    # One by one, however they lie: with vectors a row would be summed in another order.
    at = row * row_step + column * column_step
    lowest = float("-inf")
    logit = tl.load(logits + at, mask=inside, other=lowest).to(wide)
    ranked = tl.where(logit == logit, logit, lowest)  # noqa: PLR0124  (NaN differs from itself)
    top = tl.max(ranked, 1)[:, None]
    mass = tl.where(inside, tl.exp(logit - top), 0.0)
    total = tl.sum(mass, 1)[:, None]
    left = inside
    place = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros((ROWS, BLOCK_K), tl.int32)
    values = tl.zeros((ROWS, BLOCK_K), wide)
    for j in range(K):
        best = tl.max(tl.where(left, ranked, lowest), 1)[:, None]
        expert = tl.min(tl.where(left & (ranked == best), column, BLOCK_E), 1)[:, None]
        chosen = tl.where(place == j, expert, chosen)
        values = tl.where(place == j, tl.exp(best - top), values)
        left = left & (column != expert)
    if wide == tl.float32:
        share = tl.div_rn(values, total + tl.zeros_like(values))
    else:
        share = values / total
    if RENORMALIZE:
        some = tl.sum(tl.where(place < K, share, 0.0), 1)[:, None]
        if wide == tl.float32:
            share = tl.div_rn(share, some + tl.zeros_like(share))
        else:
            share = share / some
    target = row * K + place
    kept = (row < rows) & (place < K)
    tl.store(weights + target, share.to(tl.float32), kept)
    tl.store(ids + target, chosen, kept)


class _Plan(NamedTuple):
    variant: Variant
    rows: int


_plans: dict[Any, _Plan] = {}


def route(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Give the weights and the ids of the chosen experts."""
    rows = logits.shape[0]
    weights = logits.new_empty((rows, k), dtype=torch.float32)
    ids = logits.new_empty((rows, k), dtype=torch.int32)
    if not rows:
        return weights, ids
    key = (logits.dtype, logits.shape[1], k, renormalize, logits.get_device())
    plan = _plans.get(key)
    if plan is None:
        plan = _plan(logits, k, renormalize)
        remember(_plans, key, plan)
    plan.variant(-(-rows // plan.rows), (logits, weights, ids), (rows, *logits.stride()))
    return weights, ids


def _plan(logits: Tensor, k: int, renormalize: bool) -> _Plan:
    """A warp takes a row, or several short ones: no choice of a next expert waits for others.

    Measured on an H200: 11.9 us for 4096 rows of 256 experts, 8 chosen, where eight rows and four
    warps a program took 14.7 (sgl-kernel: 13.7); 8.2 for 128 experts, where those took 9.9.
    """
    experts = logits.shape[1]
    block = power_of_two(experts)
    tile = INTERPRETED_TILE if INTERPRETED else _SHORT if block <= 16 else _TILE
    rows = max(1, min(tile // block, 64 if INTERPRETED else 32))
    threads = 32 if INTERPRETED else min(max(block // _EACH, 32), 256)
    constants = (experts, k, bool(renormalize), block, power_of_two(k), rows)
    variant = _route.variant(constants, threads, logits.get_device(), aligned=False)
    return _Plan(variant, rows)
