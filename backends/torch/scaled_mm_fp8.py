"""PyTorch's own product of float8 where a GPU has it for these scales, else the reference."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from torch_ops.declarations.scaled_mm_fp8 import scaled_mm_fp8 as _declaration

__all__ = ["scaled_mm_fp8"]


def scaled_mm_fp8(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    if not _native(a, b, scale_a, scale_b, out_dtype, bias):
        result: Tensor = _declaration.reference(a, b, scale_a, scale_b, out_dtype, bias)
        return result
    if scale_a.numel() == 1 and scale_b.numel() == 1:
        scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
    return torch._scaled_mm(
        _dense(a), _dense(b.t()).t(), scale_a.contiguous(), scale_b.contiguous(),
        None if bias is None else bias.contiguous(), out_dtype=out_dtype,
    )  # fmt: skip


def _dense(x: Tensor) -> Tensor:
    """Give a matrix whose rows lie one after the other, from an aligned address."""
    if x.stride() == (x.shape[1], 1) and not x.data_ptr() & 15:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _native(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> bool:
    """Whether a GPU has a product for these sizes and scales, however they lie."""
    (m, k), n = a.shape, b.shape[1]
    if not a.is_cuda or not m or not n or not k or k % 16 or n % 16:
        return False
    if out_dtype != torch.bfloat16 or (bias is not None and bias.dtype != out_dtype):
        return False  # cuBLAS has some sizes for no other dtype
    by_row = scale_a.shape == (m, 1) and scale_b.shape == (1, n)
    whole = scale_a.numel() == 1 and scale_b.numel() == 1
    return (whole or by_row) and _multiplies(a.dtype, a.get_device())


@functools.cache
def _multiplies(dtype: torch.dtype, device: int) -> bool:
    if torch.version.hip is not None:
        return False  # untried there
    return dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(device) >= (8, 9)
