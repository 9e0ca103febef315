"""Launches kernels on rows of probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_ops.declarations._sampling import mass_bits

from . import _sampling_kernels as kernels
from ._launch import INTERPRETED, INTERPRETED_TILE, Kernel, Launch, Variant, remember
from ._rows import as_rows, lane_of, power_of_two

__all__ = ["draw", "keep_min_p", "renormalize_top_k", "renormalize_top_p"]

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
    return _filtered(kernels.renormalize, probs, k, False)


def renormalize_top_p(probs: Tensor, p: Tensor) -> Tensor:
    """Keep the fewest of each row that reach p, divided by their sum."""
    return _filtered(kernels.renormalize, probs, p, True)


def keep_min_p(probs: Tensor, part: Tensor) -> Tensor:
    """Keep of each row what is at least a part of its largest."""
    return _filtered(kernels.filter_min_p, probs, part)


def draw(probs: Tensor, k: Tensor, p: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    """Draw an index of each row from what top-k and top-p keep."""
    out = torch.empty_like(seed, memory_format=torch.contiguous_format)
    return _launched(kernels.sample, probs, out, (k, p, seed, offset))


def _filtered(kernel: Kernel, probs: Tensor, numbers: Tensor, *by_mass: bool) -> Tensor:
    out = torch.empty_like(probs, memory_format=torch.contiguous_format)
    return _launched(kernel, probs, out, (numbers,), *by_mass)


def _launched(
    kernel: Kernel, probs: Tensor, out: Tensor, numbers: tuple[Tensor, ...], *by_mass: bool
) -> Tensor:
    """Launch a program for each row."""
    if not probs.numel():
        return out
    strides = [number.stride() for number in numbers]
    key = (kernel.name, by_mass, probs.shape, probs.stride(), *strides, probs.get_device())
    known = _launches.get(key)
    if known is not None and (known.lane == 1 or probs.data_ptr() % 16 == 0):
        known.variant(known.programs, (probs, out, *numbers), known.numbers)
        return out
    columns = probs.shape[-1]
    rows = as_rows((probs,), lane_of(columns, probs.element_size()))
    variant = _variant(kernel, by_mass, columns, rows.lane, probs.get_device())
    made = Launch(variant, rows.total, (rows.lanes, rows.step[0]), rows.lane)
    flat = [number.contiguous() for number in numbers]
    variant(made.programs, (*rows.tensors, out, *flat), made.numbers)
    given, walked = (probs, *numbers), (*rows.tensors, *flat)
    if all(one is other for one, other in zip(given, walked, strict=True)):
        remember(_launches, key, made)
    return out


def _variant(
    kernel: Kernel, by_mass: tuple[bool, ...], columns: int, lane: int, device: int
) -> Variant:
    block, threads = tile(columns)
    constants: tuple[int, ...] = (lane, block)
    if kernel is not kernels.filter_min_p:
        constants = (mass_bits(columns), *constants)
    if kernel is kernels.renormalize:
        constants = (*by_mass, *constants)
    key = (kernel.name, constants, device)
    if key not in _variants:
        made = kernel.variant(constants, threads, device, aligned=lane > 1)
        _variants.setdefault(key, made)
    return _variants[key]
