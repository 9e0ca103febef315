"""Writes rows of keys and values into the slots of a paged cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ._launch import INTERPRETED, INTERPRETED_TILE, Variant, device_function, kernel
from ._pages import gathered, lane_of_steps
from ._rows import power_of_two

__all__ = ["copy", "write"]

_BYTES = 16
_TILE = 4096  # bytes of keys, and of values, that a program copies


@device_function
def copy(
    source: tl.tensor, target: tl.tensor, rows: tl.tensor, places: tl.tensor, inside: tl.tensor,
    column: tl.tensor, target_column: tl.tensor,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, LANE: tl.constexpr,
) -> None:  # fmt: skip
    values = gathered(source, rows, inside, column, WIDTH, BLOCK_W, LANE)
    columns = tl.arange(0, BLOCK_W)[None, :]
    mask = inside[:, None] & (columns < WIDTH)
    if LANE == 1:
        columns = columns * target_column
    tl.store(target + places[:, None] + columns, values, mask=mask)


@kernel(unaligned=("slot_mapping",))
def _append(
    k: tl.tensor, v: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, slot_mapping: tl.tensor,
    rows: tl.int64, heads: tl.int32, slots: tl.int64,
    k_row: tl.int64, k_head: tl.int64, k_column: tl.int64,
    v_row: tl.int64, v_head: tl.int64, v_column: tl.int64,
    kc_page: tl.int64, kc_row: tl.int64, kc_head: tl.int64, kc_column: tl.int64,
    vc_page: tl.int64, vc_row: tl.int64, vc_head: tl.int64, vc_column: tl.int64,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, LANE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
) -> None:  # fmt: skip
    """Copy BLOCK_R heads; a slot that is negative or past the last skips its token.

    Strides are in lanes; those of columns are used where LANE is 1.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head = row // heads, row % heads
    slot = tl.load(slot_mapping + token, mask=row < rows, other=-1)
    inside = (slot >= 0) & (slot < slots)
    slot = tl.where(inside, slot, 0)
    page, within = slot // PAGE, slot % PAGE
    source = token * (k_row * LANE) + head * (k_head * LANE)
    target = page * (kc_page * LANE) + within * (kc_row * LANE) + head * (kc_head * LANE)
    copy(k, k_cache, source, target, inside, k_column, kc_column, WIDTH, BLOCK_D, LANE)
    source = token * (v_row * LANE) + head * (v_head * LANE)
    target = page * (vc_page * LANE) + within * (vc_row * LANE) + head * (vc_head * LANE)
    copy(v, v_cache, source, target, inside, v_column, vc_column, WIDTH_V, BLOCK_V, LANE)


class _Plan(NamedTuple):
    variant: Variant
    block_r: int
    steps: tuple[int, ...]


def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's rows into its slot."""
    tokens, heads = k.shape[:2]
    rows = tokens * heads
    if not rows or not k_cache.shape[0] or not (k.shape[2] or v.shape[2]):
        return
    tensors = (k, v, k_cache, v_cache)
    aligned = not any(t.data_ptr() % _BYTES for t in tensors)
    sizes = (k_cache.shape[1], k.shape[2], v.shape[2])
    plan = _plan(sizes, tuple(t.stride() for t in tensors), k.dtype, k.get_device(), aligned)
    slots = k_cache.shape[0] * k_cache.shape[1]
    plan.variant(
        -(-rows // plan.block_r), (*tensors, slot_mapping.contiguous()),
        (rows, heads, slots, *plan.steps),
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _plan(
    sizes: tuple[int, int, int], strides: tuple[Sequence[int], ...], dtype: torch.dtype,
    device: int, aligned: bool,
) -> _Plan:  # fmt: skip
    """Plan calls of any number of tokens.

    Args:
        sizes: Slots of a page, elements of a head of keys and of values.
        strides: Those of k, v, k_cache and v_cache.
        aligned: Whether all addresses are multiples of 16 bytes.
    """
    page, *widths = sizes
    lane = lane_of_steps(strides, dtype.itemsize, aligned)
    block_d, block_v = (power_of_two(max(width, lane)) for width in widths)
    tile = INTERPRETED_TILE if INTERPRETED else _TILE // dtype.itemsize
    block_r = max(1, tile // max(block_d, block_v))
    constants = (*widths, lane, page, block_r, block_d, block_v)
    variant = _append.variant(constants, 256, device, aligned=lane > 1)
    return _Plan(variant, block_r, tuple(step // lane for steps in strides for step in steps))
