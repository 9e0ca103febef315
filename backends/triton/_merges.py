"""Merges two attention states by the weights of their softmax denominators."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ._launch import INTERPRETED, INTERPRETED_TILE, Variant, device_function, kernel
from ._rows import Rows, as_rows, lane_of, offset, power_of_two

__all__ = ["merge"]


@device_function
def _weighted(
    v: tl.tensor, weight: tl.tensor, at: tl.tensor, mask: tl.tensor, LOAD: tl.constexpr
) -> tl.tensor:
    """Scale a part; one of weight 0 isn't read, so that NaN there has no effect."""
    x = tl.load(v + at, mask & (weight != 0), other=0.0, eviction_policy=LOAD)
    return x.to(weight.dtype) * weight


@kernel(unaligned=("s_a", "s_b", "s"))
def _merge(
    v_a: tl.tensor, v_b: tl.tensor, v: tl.tensor, s_a: tl.tensor, s_b: tl.tensor, s: tl.tensor,
    rows: tl.int64, lanes: tl.int32, a_step: tl.int64, a_outer: tl.int64,
    b_step: tl.int64, b_outer: tl.int64, inner: tl.int64,
    NESTED: tl.constexpr, LANE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    LOAD: tl.constexpr, STORE: tl.constexpr,
) -> None:  # fmt: skip
    """Merge ROWS heads; an LSE of +inf marks an empty part, as -inf does."""
    wide: tl.constexpr = tl.float64 if v_a.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    exists = row < rows
    empty = float("-inf")
    a = tl.load(s_a + row, exists, other=empty).to(wide)
    b = tl.load(s_b + row, exists, other=empty).to(wide)
    a = tl.where(a == float("inf"), empty, a)
    b = tl.where(b == float("inf"), empty, b)
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    shift = tl.where(top == empty, 0.0, top)
    weight_a = tl.exp(a - shift)
    weight_b = tl.exp(b - shift)
    total = weight_a + weight_b
    divisor = tl.where(total == 0, 1.0, total)
    if wide == tl.float32:
        part_a, part_b = tl.div_rn(weight_a, divisor), tl.div_rn(weight_b, divisor)
    else:
        part_a, part_b = weight_a / divisor, weight_b / divisor
    mask = exists & (cols < lanes * LANE)
    a_at = offset(row, a_step, a_outer, inner, LANE, NESTED) + cols
    b_at = offset(row, b_step, b_outer, inner, LANE, NESTED) + cols
    merged = _weighted(v_a, part_a, a_at, mask, LOAD) + _weighted(v_b, part_b, b_at, mask, LOAD)
    target = v + row * lanes * LANE + cols
    tl.store(target, merged.to(v.dtype.element_ty), mask, eviction_policy=STORE)
    merged_s = tl.where(total == 0, empty, shift + tl.log(divisor))
    tl.store(s + row, merged_s.to(tl.float32), exists)


class Config(NamedTuple):
    """How heads are grouped into tiles.

    Attributes:
        rows: Heads of a tile.
        threads: Threads of one program.
        load, store: Eviction policies.
    """

    rows: int
    threads: int
    load: str = ""
    store: str = ""


def config(block: int, itemsize: int) -> Config:
    """Choose by the padded head_dim: 16 bytes of each part a thread."""
    if INTERPRETED:
        return Config(rows=max(1, INTERPRETED_TILE // block), threads=32)
    rows = max(1, 2048 // (itemsize * block))
    return Config(rows, min(max(rows * block * itemsize // 16, 32), 512))


class _Plan(NamedTuple):
    variant: Variant
    rows: int


_plans: dict[Any, _Plan] = {}


def merge(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Give the merged values and their log-sum-exp."""
    v = torch.empty_like(v_a, memory_format=torch.contiguous_format)
    s = torch.empty_like(s_a, memory_format=torch.contiguous_format)
    if not s.numel():
        return v, s
    if not v.numel():  # heads of no elements still have a sum
        return v, merge(s_a.unsqueeze(-1), s_a, s_b.unsqueeze(-1), s_b)[1]
    rows = as_rows((v_a, v_b), lane_of(v_a.shape[-1], v_a.element_size()))
    key = (v_a.dtype, rows.lanes, rows.lane, rows.inner > 0, v_a.get_device())
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.setdefault(key, _plan(rows))
    plan.variant(
        -(-rows.total // plan.rows),
        (*rows.tensors, v, s_a.contiguous(), s_b.contiguous(), s),
        (
            rows.total, rows.lanes, rows.step[0], rows.outer[0], rows.step[1], rows.outer[1],
            rows.inner,
        ),
    )  # fmt: skip
    return v, s


def _plan(rows: Rows) -> _Plan:
    v = rows.tensors[0]
    block = power_of_two(v.shape[-1])
    chosen = config(block, v.element_size())
    constants = (rows.inner > 0, rows.lane, block, chosen.rows, chosen.load, chosen.store)
    variant = _merge.variant(constants, chosen.threads, v.get_device(), aligned=rows.lane > 1)
    return _Plan(variant, chosen.rows)
