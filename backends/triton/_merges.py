"""Merges two attention states by the weights of their softmax denominators."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ._launch import (
    INTERPRETED,
    INTERPRETED_TILE,
    Launch,
    Variant,
    device_function,
    kernel,
    remember,
)
from ._rows import Rows, as_rows, lane_of, offset, power_of_two

__all__ = ["merge"]


@device_function
def _weighted(v: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """Scale a part; NaN in a part of weight 0 has no effect."""
    return tl.where(weight == 0, 0.0, v.to(weight.dtype) * weight)


@kernel(unaligned=("s_a", "s_b", "s"))
def _merge(
    v_a: tl.tensor, v_b: tl.tensor, v: tl.tensor, s_a: tl.tensor, s_b: tl.tensor, s: tl.tensor,
    rows: tl.int64, lanes: tl.int32, a_step: tl.int64, a_outer: tl.int64,
    b_step: tl.int64, b_outer: tl.int64, inner: tl.int64,
    NESTED: tl.constexpr, LANE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Merge ROWS heads; an LSE of +inf marks an empty part, as -inf does.

    Rounded weights may add up to more than 1: a value stays between those of its parts.
    """
    wide: tl.constexpr = tl.float64 if v_a.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    exists = row < rows
    mask = exists & (cols < lanes * LANE)
    empty = float("-inf")
    a_at = offset(row, a_step, a_outer, inner, LANE, NESTED) + cols
    b_at = offset(row, b_step, b_outer, inner, LANE, NESTED) + cols
    value_a = tl.load(v_a + a_at, mask, other=0.0)
    value_b = tl.load(v_b + b_at, mask, other=0.0)
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
    merged = _weighted(value_a, part_a) + _weighted(value_b, part_b)
    wide_a, wide_b = value_a.to(wide), value_b.to(wide)
    low, high = tl.minimum(wide_a, wide_b), tl.maximum(wide_a, wide_b)
    merged = tl.where(merged < low, low, tl.where(merged > high, high, merged))
    merged = tl.where(total == 0, 0.0, merged)
    tl.store(v + row * lanes * LANE + cols, merged.to(v.dtype.element_ty), mask)
    merged_s = tl.where(total == 0, empty, shift + tl.log(divisor))
    tl.store(s + row, merged_s.to(tl.float32), exists)


class Config(NamedTuple):
    """How heads are grouped into tiles.

    Attributes:
        rows: Heads of a tile.
        threads: Threads of one program.
    """

    rows: int
    threads: int


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
_launches: dict[Any, Launch] = {}


def merge(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Give the merged values and their log-sum-exp."""
    v = torch.empty_like(v_a, memory_format=torch.contiguous_format)
    s = torch.empty_like(s_a, memory_format=torch.contiguous_format)
    key = (
        v_a.dtype, v_a.shape, v_a.stride(), v_b.stride(), s_a.stride(), s_b.stride(),
        v_a.get_device(),
    )  # fmt: skip
    known = _launches.get(key)
    if known is not None and (known.lane == 1 or (v_a.data_ptr() | v_b.data_ptr()) % 16 == 0):
        known.variant(known.programs, (v_a, v_b, v, s_a, s_b, s), known.numbers)
    elif not v.numel() and s.numel():  # heads of no elements still have a sum
        values = v_a.new_zeros((*s_a.shape, 1))
        s = merge(values, s_a, values, s_b)[1]
    elif s.numel():
        made = _find(v_a, s_a, v_b, s_b, v, s)
        if made is not None:
            remember(_launches, key, made)
    return v, s


def _find(
    v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, v: Tensor, s: Tensor
) -> Launch | None:
    """Copy what the kernel can't walk, launch, and give the launch if it can be repeated."""
    rows = as_rows((v_a, v_b), lane_of(v_a.shape[-1], v_a.element_size()))
    key = (v_a.dtype, rows.lanes, rows.lane, rows.inner > 0, v_a.get_device())
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.setdefault(key, _plan(rows))
    flat_a, flat_b = s_a.contiguous(), s_b.contiguous()
    programs = -(-rows.total // plan.rows)
    steps = (rows.step[0], rows.outer[0], rows.step[1], rows.outer[1])
    numbers = (rows.total, rows.lanes, *steps, rows.inner)
    plan.variant(programs, (*rows.tensors, v, flat_a, flat_b, s), numbers)
    given = (v_a, v_b, s_a, s_b)
    walked = (*rows.tensors, flat_a, flat_b)
    same = all(one is other for one, other in zip(given, walked, strict=True))
    return Launch(plan.variant, programs, numbers, rows.lane) if same else None


def _plan(rows: Rows) -> _Plan:
    v = rows.tensors[0]
    block = power_of_two(v.shape[-1])
    chosen = config(block, v.element_size())
    constants = (rows.inner > 0, rows.lane, block, chosen.rows)
    variant = _merge.variant(constants, chosen.threads, v.get_device(), aligned=rows.lane > 1)
    return _Plan(variant, chosen.rows)
