"""Normalizes rows and quantizes them, in one kernel but where the norm splits few long rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops.declarations._quantization import AMAX_FLOOR, largest

from . import _norm_quantization_kernels as kernels
from ._launch import Launch, Variant, remember
from ._norms import FEW, RMS, add_normalize, config, loop, normalize, reads_twice
from ._quantization import quantize_rows
from ._rows import Rows, as_rows, as_vector, lane_of, power_of_two

__all__ = ["add_normalize_quantize", "normalize_quantize"]

_CROWD = 512


class _Plan(NamedTuple):
    variant: Variant
    rows: int


_plans: dict[Any, _Plan] = {}
_launches: dict[Any, Launch] = {}


def normalize_quantize(
    x: Tensor, w: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Give codes of the normalized rows, rounded first, and their scales ``[..., 1]``."""
    if _splits(x):
        return quantize_rows(normalize(x, w, None, eps, RMS), dtype)
    q, s = _empty(x, dtype)
    _run(x, None, w, q, s, None, eps)
    return q, s


def add_normalize_quantize(
    x: Tensor, r: Tensor, w: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Give codes and scales of the normalized rows of the rounded sum x + r, and that sum."""
    if _splits(x):
        y, total = add_normalize(x, r, w, eps)
        return (*quantize_rows(y, dtype), total)
    q, s = _empty(x, dtype)
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    _run(x, r, w, q, s, total, eps)
    return q, s, total


def _splits(x: Tensor) -> bool:
    """Whether the norm takes a row in several programs, whose sum has another order."""
    columns = x.shape[-1]
    rows = x.numel() // columns if columns else 0
    crowded = rows > _CROWD
    return rows <= FEW and reads_twice(columns, x.element_size(), crowded, center=False)


def _empty(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q = x.new_empty(x.shape, dtype=dtype)
    return q, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _run(
    x: Tensor, r: Tensor | None, w: Tensor, q: Tensor, s: Tensor, total: Tensor | None, eps: float
) -> None:
    """Repeat a launch that was made for such arguments, or find out which to make."""
    key = (
        x.dtype, x.shape, x.stride(), None if r is None else r.stride(), w.dtype, w.stride(),
        q.dtype, x.get_device(),
    )  # fmt: skip
    known = _launches.get(key)
    if known is not None and (known.lane == 1 or _aligned(x, r, w)):
        known.variant(known.programs, (x, r, w, q, s, total), (*known.numbers, eps))
    elif x.numel():
        made = _find(x, r, w, q, s, total, eps)
        if made is not None:
            remember(_launches, key, made)
    elif s.numel():  # rows of nothing
        s.fill_(AMAX_FLOOR / largest(q.dtype))


def _aligned(x: Tensor, r: Tensor | None, w: Tensor) -> bool:
    address = x.data_ptr() | w.data_ptr()
    return (address if r is None else address | r.data_ptr()) % 16 == 0


def _find(
    x: Tensor, r: Tensor | None, w: Tensor, q: Tensor, s: Tensor, total: Tensor | None, eps: float
) -> Launch | None:
    """Copy what the kernel can't walk, launch, and give the launch if it can be repeated."""
    given = (x,) if r is None else (x, r)
    rows = as_rows(given, lane_of(x.shape[-1], x.element_size()))
    vector = as_vector(w, rows.lane)
    crowded = rows.total > _CROWD
    key = (
        x.dtype, rows.lanes, rows.lane, crowded, rows.inner > 0, r is None, w.dtype, q.dtype,
        x.get_device(),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.setdefault(key, _plan(rows, crowded, q.dtype))
    numbers = (
        rows.total, rows.lanes, rows.step[0], rows.outer[0], rows.step[-1], rows.outer[-1],
        rows.inner,
    )  # fmt: skip
    programs = -(-rows.total // plan.rows)
    residual = None if r is None else rows.tensors[1]
    pointers = (rows.tensors[0], residual, vector, q, s, total)
    plan.variant(programs, pointers, (*numbers, eps))
    walked = all(a is b for a, b in zip(rows.tensors, given, strict=True)) and vector is w
    return Launch(plan.variant, programs, numbers, rows.lane) if walked else None


def _plan(rows: Rows, crowded: bool, dtype: torch.dtype) -> _Plan:
    x, columns = rows.tensors[0], rows.lanes * rows.lane
    device, itemsize, aligned = x.get_device(), x.element_size(), rows.lane > 1
    flags = (largest(dtype), dtype == torch.int8, rows.inner > 0, rows.lane)
    if reads_twice(columns, itemsize, crowded, center=False):
        walk = loop(columns, itemsize)
        pieces = (*flags, walk.block, columns % walk.block == 0)
        return _Plan(kernels.looped.variant(pieces, walk.threads, device, aligned=aligned), 1)
    block = power_of_two(columns)
    chosen = config(block, columns, itemsize, crowded, center=False)
    constants = (*flags, block, chosen.rows, chosen.late)
    return _Plan(
        kernels.whole.variant(constants, chosen.threads, device, aligned=aligned), chosen.rows
    )
