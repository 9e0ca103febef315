"""Gated activations that are quantized: in one kernel where registers hold what shares a scale."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from torch_ops.declarations._quantization import largest

from . import _gates
from ._arithmetic import narrowed, rounded, widened
from ._gates import activated, gated
from ._launch import INTERPRETED, Launch, Variant, kernel, remember
from ._quantization import _CROWD, BY_ROW, Config, Scales, config, quantize
from ._quantization_kernels import encode_row, shared_codes, store_scales
from ._rows import Rows, as_rows, lane_of, offset, pieces_of, power_of_two, tile_rows

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


@kernel()
def _held_gate_codes(
    x: tl.tensor, q: tl.tensor, s: tl.tensor, given: tl.tensor,
    rows: tl.int64, lanes: tl.int32, pieces: tl.int32,
    x_step: tl.int64, x_outer: tl.int64, inner: tl.int64,
    ACTIVATION: tl.constexpr, LARGEST: tl.constexpr, INT8: tl.constexpr, NESTED: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
) -> None:  # fmt: skip
    """Take one row of PIECES times BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    gate = x + offset(row, x_step, x_outer, inner, LANE, NESTED)
    gates = pieces_of(gate, BLOCK, PIECES)
    values = pieces_of(gate + lanes * LANE, BLOCK, PIECES)
    parts: tl.tuple = ()
    for piece in tl.static_range(PIECES):
        v = activated(widened(gates[piece]), ACTIVATION) * widened(values[piece])
        parts += (narrowed(v, x),)  # what the gate alone would have stored
    scale = encode_row(parts, q + row * lanes * LANE, None, LARGEST, INT8, BLOCK, PIECES)
    tl.store(s + row + tl.arange(0, 1), scale)


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
    tile = _tile(columns, x.element_size(), crowded, scales)
    short = scales.by_row and tile.block * tile.pieces < columns
    if not scales.fuse() or scales.group > tile.block or short:
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
    tile = _tile(columns, x.element_size(), crowded, scales)
    flags = (activation, largest(dtype), dtype == torch.int8, rows.inner > 0, rows.lane)
    device, aligned = x.get_device(), rows.lane > 1
    if tile.pieces > 1:
        holding = (*flags, tile.block, tile.pieces)
        variant = _held_gate_codes.variant(holding, tile.threads, device, aligned=aligned)
        return _Plan(variant, 1, 1)
    constants = (*flags, tile.block, tile.rows, scales.group)
    variant = _gate_codes.variant(constants, tile.threads, device, aligned=aligned)
    return _Plan(variant, tile.rows, -(-columns // tile.block))


def _tile(columns: int, itemsize: int, crowded: bool, scales: Scales) -> Config:
    """Choose what a program takes: whole rows where these share a scale.

    Measured on an H200 for silu_and_mul_quant_fp8 in bfloat16, where copies of as many bytes take
    83.5, 163, 83.7, 102, 142 and 283 us: in halves of 16 bytes a thread 86.7 us for 16384x4096 and
    167 for 16384x8192 (91.1 and 174 whole); in quarters of 8 bytes a thread 89.5 for 4096x16384
    (94.0 in halves of 16); in pieces of 8 bytes a thread 108, 144 and 281 for 16384x5120, 7168 and
    14336 (116, 160 and 335 with 16: registers hold too much for a thread).
    """
    if not scales.by_row:
        return Config(*_gates.config(columns, itemsize))
    chosen, size = config(columns, itemsize, crowded), columns * itemsize
    if INTERPRETED or not crowded:
        return chosen
    if columns < power_of_two(columns):
        return chosen._replace(threads=chosen.threads * min(chosen.pieces, 2))
    if 8192 <= size <= 16384:
        return Config(columns // 2, 1, size // 32, 2)
    return Config(columns // 4, 1, 1024, 4) if size == 32768 else chosen
