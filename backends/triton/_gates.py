"""Gated activations: ``y = act(gate) * value``, both in one row of x."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor

from ._arithmetic import reciprocal
from ._launch import (
    INTERPRETED,
    INTERPRETED_TILE,
    Launch,
    Variant,
    device_function,
    kernel,
    remember,
)
from ._rows import Rows, as_rows, lane_of, offset, power_of_two, tile_rows

__all__ = ["GELU", "GELU_TANH", "SILU", "activated", "config", "gated", "sigmoid"]

SILU, GELU, GELU_TANH = 0, 1, 2


@device_function
def sigmoid(x: tl.tensor) -> tl.tensor:
    """Neither overflow nor cancellation: the exponential is of ``-|x|``."""
    falling = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, falling) * reciprocal(1.0 + falling)


@device_function
def activated(g: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Apply one of the activations."""
    if ACTIVATION == 0:
        g *= sigmoid(g)
    elif ACTIVATION == 1:
        g *= 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
    else:  # (1 + tanh z) / 2 is the sigmoid of 2 z
        g *= sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
    return g


@kernel()
def _gate(
    x: tl.tensor, y: tl.tensor,
    rows: tl.int64, lanes: tl.int32, pieces: tl.int32,
    x_step: tl.int64, x_outer: tl.int64, inner: tl.int64,
    ACTIVATION: tl.constexpr, NESTED: tl.constexpr, LANE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Write BLOCK columns of ROWS rows."""
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    row = tile_rows(tl.program_id(0) // pieces, ROWS)
    cols = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)[None, :]
    columns = lanes * LANE
    mask = cols < columns
    if ROWS > 1:
        mask &= row < rows
    gate = x + offset(row, x_step, x_outer, inner, LANE, NESTED)
    g = tl.load(gate + cols, mask, other=0.0).to(wide)
    v = tl.load(gate + columns + cols, mask, other=0.0).to(wide)
    result = (activated(g, ACTIVATION) * v).to(y.dtype.element_ty)
    tl.store(y + row * lanes * LANE + cols, result, mask)


class Config(NamedTuple):
    """How rows are cut into tiles.

    Attributes:
        block: Columns of a tile, a power of two.
        rows: Rows of a tile.
        threads: Threads of one program.
    """

    block: int
    rows: int
    threads: int


def config(columns: int, itemsize: int) -> Config:
    """Choose by the length of an output row: 16 bytes of gate and of value a thread."""
    if INTERPRETED:
        block = min(power_of_two(columns), INTERPRETED_TILE)
        return Config(block, INTERPRETED_TILE // block, 32)
    tile = 4096 // itemsize
    block = min(power_of_two(columns), tile)
    return Config(block, tile // block, 256)


class _Plan(NamedTuple):
    variant: Variant
    rows: int
    pieces: int


class _Known(NamedTuple):
    launch: Launch
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_plans: dict[Any, _Plan] = {}
_launches: dict[Any, _Known] = {}


def gated(x: Tensor, activation: int) -> Tensor:
    """Multiply the activated first half of each row by the second half."""
    key = (x.dtype, x.shape, x.stride(), activation, x.get_device())
    known = _launches.get(key)
    if known is not None:
        launch = known.launch
        if launch.lane == 1 or x.data_ptr() % 16 == 0:
            y = x.new_empty_strided(known.shape, known.strides)
            launch.variant(launch.programs, (x, y), launch.numbers)
            return y
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    if x.numel():
        made = _find(x, y, activation)
        if made is not None:
            remember(_launches, key, _Known(made, tuple(y.shape), y.stride()))
    return y


def _find(x: Tensor, y: Tensor, activation: int) -> Launch | None:
    """Copy what the kernel can't walk, launch, and give the launch if it can be repeated."""
    columns = y.shape[-1]
    rows = as_rows((x,), lane_of(columns, x.element_size()))
    key = (x.dtype, columns, rows.lane, rows.inner > 0, activation, x.get_device())
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.setdefault(key, _plan(rows, columns, activation))
    programs = -(-rows.total // plan.rows) * plan.pieces
    lanes = rows.lanes // 2
    numbers = (rows.total, lanes, plan.pieces, rows.step[0], rows.outer[0], rows.inner)
    plan.variant(programs, (rows.tensors[0], y), numbers)
    return Launch(plan.variant, programs, numbers, rows.lane) if rows.tensors[0] is x else None


def _plan(rows: Rows, columns: int, activation: int) -> _Plan:
    x = rows.tensors[0]
    chosen = config(columns, x.element_size())
    constants = (activation, rows.inner > 0, rows.lane, chosen.block, chosen.rows)
    variant = _gate.variant(constants, chosen.threads, x.get_device(), aligned=rows.lane > 1)
    return _Plan(variant, chosen.rows, -(-columns // chosen.block))
