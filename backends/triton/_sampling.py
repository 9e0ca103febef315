"""Launches kernels on rows of probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_ops.declarations._sampling import mass_bits

from . import _sampling_kernels as kernels
from ._launch import INTERPRETED, INTERPRETED_TILE, Kernel, Launch, Variant, remember
from ._rows import as_rows, as_vector, lane_of, power_of_two

__all__ = ["keep_min_p", "renormalize_top_k", "renormalize_top_p"]

_TILE = 4096  # elements: 8 a thread
_launches: dict[Any, Launch] = {}
_variants: dict[Any, Variant] = {}


def tile(columns: int) -> tuple[int, int]:
    """Give columns of a pass's step and threads of a program."""
    if INTERPRETED:
        return min(power_of_two(columns), INTERPRETED_TILE), 32
    block = min(power_of_two(columns), _TILE)
    return block, min(max(block // 8, 32), 512)


def renormalize_top_k(probs: Tensor, k: Tensor) -> Tensor:
    """Keep the k largest of each row, divided by their sum."""
    return _filtered(kernels.renormalize, probs, k, (False, mass_bits(probs.shape[-1])))


def renormalize_top_p(probs: Tensor, p: Tensor) -> Tensor:
    """Keep the fewest of each row that reach p, divided by their sum."""
    return _filtered(kernels.renormalize, probs, p, (True, mass_bits(probs.shape[-1])))


def keep_min_p(probs: Tensor, part: Tensor) -> Tensor:
    """Keep of each row what is at least a part of its largest."""
    return _filtered(kernels.filter_min_p, probs, part, ())


def _filtered(kernel: Kernel, probs: Tensor, numbers: Tensor, constants: tuple[int, ...]) -> Tensor:
    out = torch.empty_like(probs, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    key = (kernel.name, constants[:1], probs.shape, probs.stride(), numbers.stride(),
           probs.get_device())  # fmt: skip
    known = _launches.get(key)
    if known is not None and (known.lane == 1 or probs.data_ptr() % 16 == 0):
        known.variant(known.programs, (probs, out, numbers), known.numbers)
        return out
    row, flat, made = _prepared(kernel, probs, numbers, constants)
    made.variant(made.programs, (row, out, flat), made.numbers)
    if row is probs and flat is numbers:
        remember(_launches, key, made)
    return out


def _prepared(
    kernel: Kernel, probs: Tensor, numbers: Tensor, constants: tuple[int, ...]
) -> tuple[Tensor, Tensor | None, Launch]:
    """Copy what a kernel can't walk, and give the launch."""
    columns = probs.shape[-1]
    rows = as_rows((probs,), lane_of(columns, probs.element_size()))
    block, threads = tile(columns)
    key = (kernel.name, constants, rows.lane, block, probs.get_device())
    variant = _variants.get(key)
    if variant is None:
        wanted = (*constants, rows.lane, block)
        made = kernel.variant(wanted, threads, probs.get_device(), aligned=rows.lane > 1)
        variant = _variants.setdefault(key, made)
    launch = Launch(variant, rows.total, (rows.lanes, rows.step[0]), rows.lane)
    return rows.tensors[0], as_vector(numbers, 1), launch
