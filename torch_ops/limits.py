"""Reasons for backends whose kernels read rows in vectors of 16 bytes, as FlashInfer's do.

Predicates of the hot path: one look at the usual call, everything else only where that fails.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "HALVES",
    "OFFSETS",
    "gate",
    "misaligned",
    "norm",
    "product",
    "rows",
    "strides",
    "unrounded_sum",
    "unsupported",
    "without_float8",
]

HALVES = (torch.float16, torch.bfloat16)
OFFSETS = 2**32
"""Offsets of rows are 32 bits wide, unsigned."""


def unsupported(name: str, x: Tensor, dtypes: Sequence[torch.dtype]) -> str:
    """Say that a tensor has none of these dtypes."""
    return f"{name} dtype {x.dtype} (supported: {', '.join(map(str, dtypes))})"


def unrounded_sum(x: Tensor) -> str:
    """Say that the sum is normalized before it is rounded to be stored."""
    return (
        f"x dtype {x.dtype}: the norm is of x + residual before the sum is rounded "
        "(the op's contract: norm_of_rounded)"
    )


def strides(name: str, x: Tensor, supported: str) -> str:
    """Say that a tensor lies in memory as the kernel can't read it."""
    return f"{name} strides {x.stride()} for shape {list(x.shape)} (supported: {supported})"


def misaligned(name: str, x: Tensor, supported: str) -> str:
    """Say that the address of a tensor isn't a multiple of a vector."""
    return f"{name} is aligned to {x.data_ptr() & -x.data_ptr()} bytes (supported: {supported})"


def rows(x: Tensor) -> Tensor:
    """Give a tensor as ``[rows, last]`` without a copy; raises where its rows are irregular."""
    return x if x.dim() == 2 else x.view(-1, x.shape[-1])


def norm(x: Tensor, weight: Tensor | None) -> str | None:
    """Give why a norm with a weight can't be had of these rows, or None."""
    if x.dtype not in HALVES:
        return unsupported("x", x, HALVES)
    if weight is None:
        # A weight of ones would cost an allocation and a launch; the other backends need none.
        return "weight None (required by the kernel)"
    if weight.dtype is not x.dtype:
        return f"weight dtype {weight.dtype} (supported: {x.dtype}, that of x); convert the weight"
    width = weight.numel()  # that of x; asking x for its shape costs as much as all else here
    if (
        x.is_contiguous()
        and weight.is_contiguous()
        and not (width & 7 or (x.data_ptr() | weight.data_ptr()) & 15)
        and x.numel() <= OFFSETS
    ):
        return None
    return _unusual_rows(x, weight)


def _unusual_rows(x: Tensor, weight: Tensor) -> str | None:
    if x.numel() == 0:
        return None
    width, size = x.shape[-1], x.element_size()
    if weight.stride(0) != 1:
        return strides("weight", weight, "1")
    try:
        flat = rows(x)
    except RuntimeError:  # how PyTorch says that there is no such view
        flat = None
    if flat is None or x.stride(-1) != 1:
        return strides("x", x, "1 for the last axis, rows at one distance from each other")
    vector = min(16, (width & -width) * size)
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.data_ptr() % vector:
            return misaligned(name, tensor, f"{vector}, for rows of {width}")
    count, pitch = flat.shape[0], flat.stride(0)
    if count > 1 and pitch * size % vector:
        return (
            f"x has {pitch} elements from row to row "
            f"(supported: multiples of {vector // size}, for rows of {width})"
        )
    span = max((count - 1) * pitch + width, count * width)
    if span > OFFSETS:
        return f"x spans {span} elements (supported: up to {OFFSETS}, offsets are 32 bits wide)"
    return None


def gate(x: Tensor, dtypes: Sequence[torch.dtype]) -> str | None:
    """Give why a gated activation can't be had of these rows, or None."""
    if x.dtype not in dtypes:
        return unsupported("x", x, dtypes)
    step = 16 // x.element_size()
    half = x.shape[-1] // 2
    if (not (half % step or x.data_ptr() & 15) and x.is_contiguous()) or x.numel() == 0:
        return None
    if half % step:
        return f"x of width {2 * half} (supported: multiples of {2 * step} in {x.dtype})"
    if not x.is_contiguous():
        return strides("x", x, "contiguous")
    return misaligned("x", x, "16")


@functools.cache
def without_float8(dtype: torch.dtype, device: int) -> str | None:
    """Give why the GPU of this index has no products of matrices ``a`` of this dtype, or None."""
    if dtype != torch.float8_e4m3fn:
        return f"a dtype {dtype} (supported: torch.float8_e4m3fn)"
    if device >= 0 and (found := torch.cuda.get_device_capability(device)) < (8, 9):
        return f"float8 on compute capability {found[0]}.{found[1]} (supported: 8.9 and later)"
    return None


def product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, multiples: tuple[int, int]
) -> str | None:
    """Give why matrices with a scale for each row and column can't be multiplied, or None.

    Args:
        a: ``[M, K]``, read row by row.
        b: ``[K, N]``, read column by column.
        scale_a, scale_b: ``[M, 1]`` and ``[1, N]``, contiguous.
        multiples: What K and N have to be multiples of.
    """
    depth, width = multiples
    (m, k), n = a.shape, b.shape[1]
    for name, scale, shape in (("scale_a", scale_a, (m, 1)), ("scale_b", scale_b, (1, n))):
        if tuple(scale.shape) != shape or not scale.is_contiguous():
            of = f"{list(scale.shape)} with strides {scale.stride()}"
            return f"{name} of shape {of} (supported: {list(shape)}, contiguous)"
    if not m or not n:
        return None
    if not k or k % depth or n % width:
        return f"K {k} and N {n} (supported: multiples of {depth} and of {width})"
    if a.stride() != (k, 1):
        return strides("a", a, "row-major, contiguous")
    if b.stride() != (1, k):
        return strides("b", b, "column-major, contiguous")
    for name, x in (("a", a), ("b", b)):
        if x.data_ptr() & 15:
            return misaligned(name, x, "16")
    return None
