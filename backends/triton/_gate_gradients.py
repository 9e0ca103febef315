"""Gradients of gated activations: of ``act(gate) * value`` with respect to both, in one pass."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor

from ._gates import GELU, GELU_TANH, SILU, activated, config, sigmoid
from ._launch import Variant, device_function, kernel
from ._rows import lane_of, tile_rows

__all__ = ["GELU", "GELU_TANH", "SILU", "gradient"]


@device_function
def _slope(g: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Differentiate an activation."""
    if ACTIVATION == 0:
        s = sigmoid(g)
        slope = s + g * s * sigmoid(-g)
    elif ACTIVATION == 1:
        density = 0.3989422804014327 * tl.exp(-0.5 * g * g)
        slope = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476)) + g * density
    else:
        z = 1.5957691216057308 * (g + 0.044715 * g * g * g)
        steep = 1.5957691216057308 * (1.0 + 0.134145 * g * g)
        s = sigmoid(z)
        turn = s * sigmoid(-z)  # where it is 0, so is its product with what overflows
        slope = s + tl.where(turn == 0.0, 0.0, g * turn * steep)
    return slope


@kernel()
def _gate_gradient(
    x: tl.tensor, grad: tl.tensor, dx: tl.tensor,
    rows: tl.int64, columns: tl.int32, pieces: tl.int32,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Write BLOCK columns of both halves of ROWS rows."""
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    row = tile_rows(tl.program_id(0) // pieces, ROWS)
    cols = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = cols < columns
    if ROWS > 1:
        mask &= row < rows
    at = row * columns * 2
    g = tl.load(x + at + cols, mask, other=0.0).to(wide)
    v = tl.load(x + at + columns + cols, mask, other=0.0).to(wide)
    d = tl.load(grad + row * columns + cols, mask, other=0.0).to(wide)
    dg, dv = d * v * _slope(g, ACTIVATION), d * activated(g, ACTIVATION)
    tl.store(dx + at + cols, dg.to(dx.dtype.element_ty), mask)
    tl.store(dx + at + columns + cols, dv.to(dx.dtype.element_ty), mask)


_variants: dict[Any, Variant] = {}


def gradient(x: Tensor, grad: Tensor, activation: int) -> Tensor:
    """Give the gradient of x from that of the result."""
    x, grad = x.contiguous(), grad.contiguous()
    dx = x.new_empty(x.shape)
    if not x.numel():
        return dx
    columns = x.shape[-1] // 2
    aligned = lane_of(columns, x.element_size()) > 1 and not (x.data_ptr() | grad.data_ptr()) & 15
    tile = config(columns, x.element_size())
    key = (x.dtype, tile, aligned, activation, x.get_device())
    variant = _variants.get(key)
    if variant is None:
        constants = (activation, tile.block, tile.rows)
        made = _gate_gradient.variant(constants, tile.threads, x.get_device(), aligned=aligned)
        variant = _variants.setdefault(key, made)
    rows, pieces = grad.numel() // columns, -(-columns // tile.block)
    variant(-(-rows // tile.rows) * pieces, (x, grad, dx), (rows, columns, pieces))
    return dx
