"""FlashInfer's layernorm: bfloat16 rows with weight and bias in float32, variance in two passes."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import limits

from . import _modules

__all__ = ["layer_norm", "supports"]

_WIDTH = (
    49152  # a row is kept in 96 KiB of shared memory; where it doesn't fit, CUDA keeps an error
)
_ELEMENTS = 2**31


def supports(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> str | None:
    if x.dtype is not torch.bfloat16:
        return limits.unsupported("x", x, (torch.bfloat16,))
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is None:
            return f"{name} None (required by the kernel)"
        if vector.dtype is not torch.float32:
            return limits.unsupported(name, vector, (torch.float32,))
        if vector.stride(0) != 1:  # also of a single element
            return limits.strides(name, vector, "1")
        if vector.data_ptr() & 7:
            return limits.misaligned(name, vector, "8")
    if x.numel() == 0:
        return None
    if not x.is_contiguous() or x.stride(-1) != 1:
        return limits.strides("x", x, "contiguous")
    if x.data_ptr() & 3:
        return limits.misaligned("x", x, "4")
    if x.shape[-1] > _WIDTH:
        return f"rows of {x.shape[-1]} (supported: up to {_WIDTH}, kept in shared memory)"
    if x.numel() > _ELEMENTS:
        return f"x of {x.numel()} elements (supported: up to {_ELEMENTS}, offsets are 32 bits wide)"
    return None


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        rows = limits.rows
        _modules.norm("layernorm")(rows(out), rows(x), weight, bias, eps)
    return out
