"""Gated activations that are quantized: in one kernel where registers hold a row, else in two."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from torch_ops.declarations._quantization import AMAX_FLOOR, largest

from ._gates import activated, gated
from ._launch import Launch, Variant, kernel, remember
from ._quantization import _CROWD, config, quantize_rows
from ._quantization_kernels import codes, scale_of
from ._rows import Rows, as_rows, lane_of, offset

__all__ = ["gated_quantize"]


@kernel()
def _gate_codes(
    x: tl.tensor, q: tl.tensor, s: tl.tensor,
    rows: tl.int64, lanes: tl.int32, x_step: tl.int64, x_outer: tl.int64, inner: tl.int64,
    ACTIVATION: tl.constexpr, LARGEST: tl.constexpr, INT8: tl.constexpr, NESTED: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Take ROWS rows, each read once."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    columns = lanes * LANE
    mask = cols < columns
    if ROWS > 1:
        mask &= row < rows
    gate = x + offset(row, x_step, x_outer, inner, LANE, NESTED) + cols
    g = tl.load(gate, mask, other=0.0).to(tl.float32)
    v = tl.load(gate + columns, mask, other=0.0).to(tl.float32)
    v = activated(g, ACTIVATION) * v
    v = v.to(x.dtype.element_ty).to(tl.float32)  # what the gate alone would have stored
    scale = scale_of(tl.max(tl.abs(v), 1, keep_dims=True), LARGEST)
    v = codes(v, tl.div_rn(1.0, scale), LARGEST, INT8)
    tl.store(q + row * lanes * LANE + cols, v.to(q.dtype.element_ty), mask)
    tl.store(s + row, scale, row < rows)


class _Plan(NamedTuple):
    variant: Variant
    rows: int


_plans: dict[Any, _Plan] = {}
_launches: dict[Any, Launch] = {}


def gated_quantize(x: Tensor, activation: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Give codes of the gated rows, rounded first, and their scales ``[..., 1]``."""
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    columns = shape[-1]
    crowded = columns > 0 and x.numel() // (2 * columns) > _CROWD
    if columns and config(columns, x.element_size(), crowded).block < columns:
        return quantize_rows(gated(x, activation), dtype)
    q = x.new_empty(shape, dtype=dtype)
    s = x.new_empty((*shape[:-1], 1), dtype=torch.float32)
    key = (x.dtype, x.shape, x.stride(), activation, dtype, x.get_device())
    known = _launches.get(key)
    if known is not None and (known.lane == 1 or x.data_ptr() % 16 == 0):
        known.variant(known.programs, (x, q, s), known.numbers)
    elif x.numel():
        made = _find(x, q, s, activation)
        if made is not None:
            remember(_launches, key, made)
    elif s.numel():  # rows of nothing
        s.fill_(AMAX_FLOOR / largest(dtype))
    return q, s


def _find(x: Tensor, q: Tensor, s: Tensor, activation: int) -> Launch | None:
    """Copy what the kernel can't walk, launch, and give the launch if it can be repeated."""
    columns = q.shape[-1]
    rows = as_rows((x,), lane_of(columns, x.element_size()))
    crowded = rows.total > _CROWD
    key = (
        x.dtype, columns, rows.lane, rows.inner > 0, crowded, activation, q.dtype, x.get_device()
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.setdefault(key, _plan(rows, columns, crowded, activation, q.dtype))
    programs = -(-rows.total // plan.rows)
    numbers = (rows.total, rows.lanes // 2, rows.step[0], rows.outer[0], rows.inner)
    plan.variant(programs, (rows.tensors[0], q, s), numbers)
    return Launch(plan.variant, programs, numbers, rows.lane) if rows.tensors[0] is x else None


def _plan(rows: Rows, columns: int, crowded: bool, activation: int, dtype: torch.dtype) -> _Plan:
    x = rows.tensors[0]
    chosen = config(columns, x.element_size(), crowded)
    flags = (activation, largest(dtype), dtype == torch.int8, rows.inner > 0, rows.lane)
    constants = (*flags, chosen.block, chosen.rows)
    variant = _gate_codes.variant(constants, chosen.threads, x.get_device(), aligned=rows.lane > 1)
    return _Plan(variant, chosen.rows)
