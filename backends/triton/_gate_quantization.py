"""Gated activations that are quantized: in one kernel where registers hold what shares a scale."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from torch_ops.declarations._quantization import largest

from . import _gates
from ._arithmetic import rounded
from ._gates import activated, gated
from ._launch import Launch, Variant, kernel, remember
from ._quantization import _CROWD, BY_ROW, Scales, config, quantize
from ._quantization_kernels import shared_codes, store_scales
from ._rows import Rows, as_rows, lane_of, offset, tile_rows

__all__ = ["gated_quantize"]


@kernel(unaligned=("given",))
def _gate_codes(
    x: tl.tensor, q: tl.tensor, s: tl.tensor, given: tl.tensor,
    rows: tl.int64, lanes: tl.int32, pieces: tl.int32,
    x_step: tl.int64, x_outer: tl.int64, inner: tl.int64,
    ACTIVATION: tl.constexpr, LARGEST: tl.constexpr, INT8: tl.constexpr, NESTED: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Take BLOCK columns of ROWS rows."""
    row = tile_rows(tl.program_id(0) // pieces, ROWS)
    begin = tl.program_id(0) % pieces * BLOCK
    cols = begin + tl.arange(0, BLOCK)[None, :]
    columns = lanes * LANE
    mask = cols < columns
    if ROWS > 1:
        mask &= row < rows
    gate = x + offset(row, x_step, x_outer, inner, LANE, NESTED)
    g = tl.load(gate + cols, mask, other=0.0).to(tl.float32)
    v = tl.load(gate + columns + cols, mask, other=0.0).to(tl.float32)
    v = activated(g, ACTIVATION) * v
    v = rounded(v, x)  # what the gate alone would have stored
    v, scale = shared_codes(v, given, LARGEST, INT8, ROWS, BLOCK, GROUP)
    tl.store(q + row * lanes * LANE + cols, v.to(q.dtype.element_ty), mask)
    store_scales(s, scale, given, row, rows, begin, columns, BLOCK, GROUP)


class _Plan(NamedTuple):
    variant: Variant
    rows: int
    pieces: int


_plans: dict[Any, _Plan] = {}
_launches: dict[Any, Launch] = {}


def gated_quantize(
    x: Tensor, activation: int, dtype: torch.dtype, scales: Scales = BY_ROW
) -> tuple[Tensor, Tensor]:
    """Give codes of the gated rows, rounded first, and their scales."""
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    columns = shape[-1]
    crowded = columns > 0 and x.numel() // (2 * columns) > _CROWD
    block = _tile(columns, x.element_size(), crowded, scales)[0]
    if not scales.fuse() or scales.group > block or (scales.by_row and block < columns):
        return quantize(gated(x, activation), dtype, scales)
    q = x.new_empty(shape, dtype=dtype)
    s = scales.empty(q)
    group, given = scales
    key = (
        x.dtype, x.shape, x.stride(), activation, dtype, group, given is None, x.get_device()
    )  # fmt: skip
    known = _launches.get(key)
    if known is not None and (known.lane == 1 or x.data_ptr() % 16 == 0):
        known.variant(known.programs, (x, q, s, given), known.numbers)
    elif x.numel():
        made = _find(x, q, s, activation, scales)
        if made is not None:
            remember(_launches, key, made)
    else:
        scales.fill(s, dtype)
    return q, s


def _find(x: Tensor, q: Tensor, s: Tensor, activation: int, scales: Scales) -> Launch | None:
    """Copy what the kernel can't walk, launch, and give the launch if it can be repeated."""
    columns = q.shape[-1]
    rows = as_rows((x,), lane_of(columns, x.element_size()))
    crowded = rows.total > _CROWD
    key = (
        x.dtype, columns, rows.lane, rows.inner > 0, crowded, activation, q.dtype, scales.group,
        scales.given is None, x.get_device(),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        made = _plan(rows, columns, crowded, activation, q.dtype, scales)
        plan = _plans.setdefault(key, made)
    programs = -(-rows.total // plan.rows) * plan.pieces
    numbers = (
        rows.total, rows.lanes // 2, plan.pieces, rows.step[0], rows.outer[0], rows.inner
    )  # fmt: skip
    plan.variant(programs, (rows.tensors[0], q, s, scales.given), numbers)
    return Launch(plan.variant, programs, numbers, rows.lane) if rows.tensors[0] is x else None


def _plan(
    rows: Rows, columns: int, crowded: bool, activation: int, dtype: torch.dtype, scales: Scales
) -> _Plan:
    x = rows.tensors[0]
    block, taken, threads = _tile(columns, x.element_size(), crowded, scales)
    flags = (activation, largest(dtype), dtype == torch.int8, rows.inner > 0, rows.lane)
    constants = (*flags, block, taken, scales.group)
    variant = _gate_codes.variant(constants, threads, x.get_device(), aligned=rows.lane > 1)
    return _Plan(variant, taken, -(-columns // block))


def _tile(columns: int, itemsize: int, crowded: bool, scales: Scales) -> tuple[int, int, int]:
    """Give columns and rows of a program and its threads: whole rows where these share a scale."""
    if scales.by_row:
        return config(columns, itemsize, crowded)
    return _gates.config(columns, itemsize)
