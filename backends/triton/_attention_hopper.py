"""Where and how the kernel for long queries on Hopper runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from torch_ops.platform import Platform

from ._launch import INTERPRETED, Variant

__all__ = ["Long", "LongConfig", "config", "describable", "descriptors", "fits", "gluon_runs"]

_VERSIONS = ((3, 6), (3, 9))  # of Triton, with whose Gluon the kernel is known to compile
_LANE = 8
_FEWEST = 128
_FARTHEST = 2**39  # bytes; strides of descriptors have 40 bits


class LongConfig(NamedTuple):
    """Tile sizes of the kernel.

    Attributes:
        block_n: Keys of a step.
        stages: Steps whose keys and values are in flight.
    """

    block_n: int
    stages: int


def config(block_d: int) -> LongConfig:
    """Choose by the padded length of a head what fits into 227 KB beside 128 queries."""
    if block_d <= 64:
        return LongConfig(128, 4)
    return LongConfig(128 if block_d <= 128 else 64, 2)


@functools.cache
def gluon_runs(device: int) -> bool:
    """Whether this Triton's Gluon is known to compile the kernels, and the GPU is a Hopper."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if INTERPRETED or device < 0 or not _VERSIONS[0] <= version <= _VERSIONS[1]:
        return False
    return Platform.detect(f"cuda:{device}").arch == "sm_90"


def describable(strides: Sequence[int]) -> bool:
    """Whether descriptors can have these strides, of dimensions of more than one element each."""
    return min(strides) > 0 and 2 * max(strides) < _FARTHEST


def fits(queries: int, head_dim: int, value_dim: int, lane: int, device: int) -> bool:
    """Whether the kernel serves a call.

    Args:
        queries: Length of the queries.
        head_dim, value_dim: Elements of a head of queries and keys, and of values.
        lane: Elements of 16 bytes if all heads start at multiples of that, or else 1.
        device: Index of the GPU, -1 on a CPU.
    """
    return (
        queries >= _FEWEST
        and lane == _LANE
        and 32 < head_dim == value_dim
        and head_dim % _LANE == 0
        and gluon_runs(device)
    )


def descriptors(
    kind: Any, bases: Sequence[Tensor], described: Sequence[dict[str, Any]]
) -> list[Any]:
    """Make descriptors of tensors; their constructor would check what `fits` has checked."""
    made = [object.__new__(kind) for _ in bases]
    for descriptor, base, fields in zip(made, bases, described, strict=True):
        descriptor.__dict__.update(fields, base=base)
    return made


class Long:
    """The kernel for calls of one shape and dtype."""

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        strides: Sequence[Sequence[int]],
        flags: tuple[bool | float, ...],
        numbers: tuple[float, ...],
        dtype: torch.dtype,
        device: int,
    ) -> None:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from ._attention_hopper_kernel import ROWS

        batch, queries, heads, head_dim = shapes[0]
        keys, kv_heads = shapes[1][1:3]
        block_d = max(64, 1 << (head_dim - 1).bit_length())
        self._variant, block_n = _variant(dtype, flags, block_d, device)
        slots = batch * heads
        self._type = TensorDescriptor
        self._programs = -(-queries // ROWS) * slots
        self._numbers = (*numbers, queries, keys, slots, heads, heads // kv_heads)
        self._described = [
            _described(shape, stride, [1, 1, rows, block_d])
            for shape, stride, rows in zip(
                (*shapes, shapes[0]),
                (*strides, (queries * heads * head_dim, heads * head_dim, head_dim, 1)),
                (ROWS // 2, block_n, block_n, ROWS // 2),
                strict=True,
            )
        ]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        made = descriptors(self._type, (q, k, v, out), self._described)
        self._variant(self._programs, (*made, lse), self._numbers)


@functools.cache
def _variant(
    dtype: torch.dtype, flags: tuple[bool | float, ...], block_d: int, device: int
) -> tuple[Variant, int]:
    """Give the kernel for a dtype and flags of `attend_long`, and the keys of its steps."""
    from ._attention_hopper_kernel import attend_long

    chosen = config(block_d)
    constants = (*flags, chosen.block_n, block_d, chosen.stages)
    options = {"enable_fp_fusion": True}
    return Variant(attend_long, constants, 4 * 32, device, options), chosen.block_n


def _described(shape: Sequence[int], stride: Sequence[int], block: list[int]) -> dict[str, Any]:
    """Describe ``[B, S, H, D]`` as ``[batch, head, row, column]``, loaded in blocks."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    strides = [s if n > 1 else _LANE for n, s in zip(shape, stride, strict=True)]
    return {
        "shape": [shape[0], shape[2], shape[1], shape[3]],
        "strides": [strides[0], strides[2], strides[1], 1],
        "block_shape": block,
        "layout": NVMMASharedLayout(128, 16, rank=4),
    }
