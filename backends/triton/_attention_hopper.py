"""Launches the kernel for long queries on Hopper, where a call fits it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from torch_ops.errors import CaptureError
from torch_ops.platform import Platform

from ._launch import INTERPRETED, multiprocessors

__all__ = ["LongConfig", "LongVariant", "config", "fits"]

_VERSIONS = ((3, 6), (3, 9))  # of Triton, whose Gluon the kernel is known to compile with
_LANE = 8
_FEWEST = 128
_FARTHEST = 2**39


class LongConfig(NamedTuple):
    """How the kernel works.

    Attributes:
        block_n: Keys of a step.
        stages: Steps whose keys and values are in flight.
        turns: Whether groups of warps take turns at the tensor cores.
        resident: Whether a program for each multiprocessor walks all tiles.
    """

    block_n: int
    stages: int
    turns: bool
    resident: bool


def config(block_d: int) -> LongConfig:
    """Choose by the padded length of a head; all that fits into 227 KB beside 128 queries."""
    if block_d <= 64:
        return LongConfig(128, 4, False, True)
    return LongConfig(128 if block_d <= 128 else 64, 2, False, True)


@functools.cache
def _available(device: int) -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if INTERPRETED or device < 0 or not _VERSIONS[0] <= version <= _VERSIONS[1]:
        return False
    return Platform.detect(f"cuda:{device}").arch == "sm_90"


def fits(q: Tensor, v: Tensor, lane: int, strides: Sequence[int], capped: bool) -> bool:
    """Whether the kernel serves a call.

    Args:
        q: Queries.
        v: Values.
        lane: Elements of which all strides are multiples, and whose bytes all addresses are.
        strides: Strides of all but the last dimension, 0 for dimensions of one element.
        capped: Whether logits are capped.
    """
    head_dim = q.shape[3]
    return (
        q.shape[1] >= _FEWEST
        and lane == _LANE
        and not capped
        and 32 < head_dim == v.shape[3]
        and head_dim % _LANE == 0
        and _available(q.get_device())
        and max(strides) < _FARTHEST
        and not any(_expanded(t) for t in (q, v))
    )


def _expanded(t: Tensor) -> bool:
    return any(s == 0 and n > 1 for n, s in zip(t.shape, t.stride(), strict=True))


class LongVariant:
    """The kernel for one device, dtype and set of constants.

    Attributes:
        config: How it works.
        constants: Values of its compile-time parameters.
        device: Index of the GPU.
    """

    def __init__(
        self, dtype: torch.dtype, flags: tuple[bool | float, ...], block_d: int, device: int,
        chosen: LongConfig | None = None,
    ) -> None:  # fmt: skip
        from triton.experimental.gluon.language import NVMMASharedLayout

        from ._attention_hopper_kernel import attend_long

        self.config = chosen or config(block_d)
        self.constants = (
            *flags, self.config.block_n, block_d, self.config.stages, self.config.turns,
        )  # fmt: skip
        self.device = device
        self._function = attend_long
        self._layout = NVMMASharedLayout(128, 16, rank=4)
        self._block_d = block_d
        self._compiled = False

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None,
        scale: float, window: int,
    ) -> None:  # fmt: skip
        """Launch on the device of the tensors and on its current stream."""
        from ._attention_hopper_kernel import ROWS

        batch, queries, heads, _ = q.shape
        keys, kv_heads = k.shape[1:3]
        slots = batch * heads
        tiles = -(-queries // ROWS) * slots
        programs = min(tiles, multiprocessors(self.device)) if self.config.resident else tiles
        if not self._compiled and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "Triton kernel 'attend_long': not compiled for these dtypes and sizes, and a "
                "stream is capturing; prepare first: make the call once before the capture"
            )
        with torch.cuda.device(self.device):
            self._function[(programs,)](
                self._describe(q, ROWS // 2), self._describe(k, self.config.block_n),
                self._describe(v, self.config.block_n), self._describe(out, ROWS // 2), lse,
                scale, window, queries, keys, slots, heads, heads // kv_heads, tiles,
                *self.constants, num_warps=4,
            )  # fmt: skip
        self._compiled = True

    def _describe(self, t: Tensor, rows: int) -> Any:
        """Describe ``[B, S, H, D]`` as ``[batch, head, row, column]``, loaded in blocks of rows."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        batch, length, heads, width = t.shape
        strides = [s if n > 1 else _LANE for n, s in zip(t.shape, t.stride(), strict=True)]
        return TensorDescriptor(
            t, [batch, heads, length, width], [strides[0], strides[2], strides[1], 1],
            [1, 1, rows, self._block_d], self._layout,
        )  # fmt: skip
