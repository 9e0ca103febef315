"""What AITER's kernels of rows can't take.

They read and write whole vectors: of a row that isn't made of them, the last one reaches into the
next row (aiter#5044). On gfx942, which has no instruction that rounds to bfloat16, they cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ops import limits
from torch_ops.platform import Platform

__all__ = ["DTYPES", "arch", "cut", "norm", "unfit", "weighted"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MOST = 2**31


def arch(x: Tensor) -> str | None:
    """Give the architecture of a tensor's GPU, None elsewhere."""
    return Platform.detect(x.device).arch if x.is_cuda else None


def cut(x: Tensor) -> str | None:
    """Give why results in the dtype of ``x`` aren't rounded, or None."""
    if x.dtype is torch.bfloat16 and (found := arch(x)) == "gfx942":
        return (
            f"x dtype {x.dtype} on {found} (supported: on gfx950; results are cut, the op's "
            "contract: rounded)"
        )
    return None


def unfit(names: Sequence[str], tensors: Sequence[Tensor]) -> str | None:
    """Give why rows can't be read where they lie, or None."""
    first = tensors[0]
    width = first.shape[-1]
    if first.numel() == 0:
        return None
    step = 16 // first.element_size()
    if width % step:
        return f"{names[0]} of width {width} (supported: multiples of {step} in {first.dtype})"
    for name, x in zip(names, tensors, strict=True):
        if not x.is_contiguous():
            return limits.strides(name, x, "contiguous")
        if x.data_ptr() & 15:
            return limits.misaligned(name, x, "16")
        if x.numel() > _MOST:
            limit = f"(supported: up to {_MOST}, offsets are 32 bits wide)"
            return f"{name} of {x.numel()} elements {limit}"
    return None


def weighted(x: Tensor, weight: Tensor | None, dtypes: Sequence[torch.dtype]) -> str | None:
    """Give why these dtypes can't be normalized, or None."""
    if x.dtype not in dtypes:
        return limits.unsupported("x", x, dtypes)
    if weight is None:
        return "weight None (required by the kernel)"
    if weight.dtype is not x.dtype:
        return f"weight dtype {weight.dtype} (supported: {x.dtype}, that of x); convert the weight"
    return None


def norm(x: Tensor, weight: Tensor | None, dtypes: Sequence[torch.dtype] = DTYPES) -> str | None:
    """Give why a norm can't be had of these rows, or None."""
    reason = weighted(x, weight, dtypes) or cut(x)
    if reason is not None or weight is None:
        return reason
    return unfit(("x", "weight"), (x, weight))
