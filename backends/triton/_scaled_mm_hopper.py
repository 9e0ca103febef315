"""Where and how the kernel for products of large float8 matrices on Hopper runs.

Measured on an H200 with a scale for each row and each column, a bias, and torch._scaled_mm side by
side: 4096 x 4096 x 4096 106 and 108 us, 8192 x 8192 x 8192 792 and 843, 8192 x 4096 x 14336 688 and
726, 4096 x 28672 x 4096 837 and 781, 1024 x 4096 x 4096 34 and 31.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ._attention_hopper import describable, descriptors, gluon_runs
from ._launch import Variant, multiprocessors

__all__ = ["Large", "fits"]

_ROWS, _COLUMNS, _STEP = 256, 128, 128  # of a tile; products of a step
_HALF = 64  # rows of an instruction
_FEWEST_TILES = 100
_LANE, _BYTES = 8, 16


def fits(a: Tensor, b: Tensor) -> bool:
    """Whether the kernel serves a product that isn't scaled in groups.

    Args:
        a, b: ``[M, K]`` and ``[K, N]``, aligned and packed along K.
    """
    tiles = -(-a.shape[0] // _ROWS) * -(-b.shape[1] // _COLUMNS)
    return (
        a.dtype == torch.float8_e4m3fn
        and tiles >= _FEWEST_TILES
        and b.shape[1] % _LANE == 0
        and describable([a.stride(0), b.stride(1)])
        and gluon_runs(a.get_device())
    )


class Large:
    """The kernel for calls of one shape.

    Args:
        a, b, y, scale_a, scale_b, bias: As those of the calls.
    """

    def __init__(
        self, a: Tensor, b: Tensor, y: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None
    ) -> None:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        (m, k), n = a.shape, b.shape[1]
        device = a.get_device()
        self._type = TensorDescriptor
        self._variant = _variant(
            y.dtype, None if bias is None else bias.dtype, scale_a.numel() == 1,
            scale_b.numel() == 1, device,
        )  # fmt: skip
        tiles = -(-m // _ROWS) * -(-n // _COLUMNS)
        self._programs = min(tiles, multiprocessors(device))
        self._numbers = m, n // _LANE, k
        self._described = (
            _described(m, k, a.stride(0), [_HALF, _STEP], 1),
            _described(n, k, b.stride(1), [_COLUMNS, _STEP], 1),
            _described(m, n, n, [_HALF, _COLUMNS], y.element_size()),
        )

    def __call__(
        self, a: Tensor, b: Tensor, y: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None
    ) -> None:
        made = descriptors(self._type, (a, b, y), self._described)
        vectors = _vector(scale_a), _vector(scale_b), None if bias is None else _vector(bias)
        self._variant(self._programs, (*made, *vectors), self._numbers)


def _vector(x: Tensor) -> Tensor:
    """Copy scales or a bias that don't lie side by side from a multiple of 16 bytes on.

    Another kernel would take them as they are, but sum to other bits.
    """
    x = x.contiguous()
    return x if x.data_ptr() % _BYTES == 0 else x.clone()


@functools.cache
def _variant(
    dtype: torch.dtype, bias: torch.dtype | None, one_a: bool, one_b: bool, device: int
) -> Variant:
    """Give the kernel for dtypes of the result and of the bias, and for kinds of scales.

    Of 227 KB a step takes 48 and what is written 32, or 64 in float32.
    """
    from ._scaled_mm_hopper_kernel import multiply_large

    stages = 4 if dtype.itemsize == 2 else 3
    return Variant(multiply_large, (one_a, one_b, stages), 4 * 32, device)


def _described(
    rows: int, columns: int, stride: int, block: list[int], itemsize: int
) -> dict[str, Any]:
    """Describe a matrix whose rows are packed, loaded or stored in blocks."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return {
        "shape": [rows, columns],
        "strides": [stride, 1],
        "block_shape": block,
        "layout": NVMMASharedLayout(128, 8 * itemsize, rank=2),
    }
