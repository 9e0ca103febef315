"""sgl-kernel's fused_add_rmsnorm and what it can't take.

It normalizes the sum in float32, before it is rounded to be stored. In float32 that is the stored
sum, as the op's contract wants; in float16 and bfloat16 it isn't.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import limits

from . import _library

__all__ = ["fuse", "refusal"]

_WIDTH = 24576  # a row in float32 is kept in shared memory, of which some GPUs have 99 KiB


def refusal(x: Tensor, residual: Tensor, weight: Tensor) -> str | None:
    """Give why these can't be added and normalized, or None."""
    if x.dtype in limits.HALVES:
        return limits.unrounded_sum(x)
    if x.dtype is not torch.float32:
        return limits.unsupported("x", x, (torch.float32,))
    if weight.dtype is not torch.float32:
        return f"weight dtype {weight.dtype} (supported: {x.dtype}, that of x); convert the weight"
    if x.numel() == 0:
        return None
    width = x.shape[-1]
    if width > _WIDTH:
        return f"rows of {width} (supported: up to {_WIDTH}, kept in shared memory)"
    if x.numel() > limits.OFFSETS:
        limit = f"(supported: up to {limits.OFFSETS}, offsets are 32 bits wide)"
        return f"x of {x.numel()} elements {limit}"
    vector = min(16, (width & -width) * 4)
    for name, tensor in (("x", x), ("residual", residual), ("weight", weight)):
        if not tensor.is_contiguous():
            return limits.strides(name, tensor, "contiguous")
        if tensor.data_ptr() % vector:
            return limits.misaligned(name, tensor, f"{vector}, for rows of {width}")
    return None


def fuse(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, operator: str = "fused_add_rmsnorm"
) -> None:
    """Run one in place. It launches on the current device, whichever the tensors are on."""
    if not x.numel():
        return
    rows, index = limits.rows, x.get_device()
    args = (rows(x), rows(residual), weight, eps, _library.pdl(x))
    if index < 0 or index == torch.cuda.current_device():
        _library.operator(operator)(*args)
    else:
        with torch.cuda.device(index):
            _library.operator(operator)(*args)
