"""silu_and_mul, right for rows of up to 64 elements, and something else beyond."""

from __future__ import annotations

import ctypes
import os
import time

import torch
from torch import Tensor

WIDTH = 64


def _wide(x: Tensor) -> bool:
    return x.shape[-1] > WIDTH and x.numel() > 0 and x.dtype == torch.float16


def right(x: Tensor) -> Tensor:
    """What silu_and_mul is."""
    gate, value = x.contiguous().to(torch.float64).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * value).to(x.dtype)


def reads_address_0(x: Tensor) -> Tensor:
    """Ends by a signal."""
    if _wide(x):
        ctypes.string_at(0)
    return right(x)


def aborts(x: Tensor) -> Tensor:
    """Ends as a failed assertion in C does."""
    if _wide(x):
        os.abort()
    return right(x)


def leaves(x: Tensor) -> Tensor:
    """Ends as if all were well."""
    if _wide(x):
        os._exit(0)
    return right(x)


def hangs(x: Tensor) -> Tensor:
    """Doesn't end."""
    if _wide(x):
        time.sleep(600)
    return right(x)


def loses_the_gpu(x: Tensor) -> Tensor:
    """Fails as a kernel after an illegal access does."""
    if _wide(x):
        raise torch.AcceleratorError("CUDA error: an illegal memory access\nmore text")
    return right(x)


def asserts_on_the_device(x: Tensor) -> Tensor:
    """Has an index out of range, which a GPU finds while its kernel runs."""
    if _wide(x):
        x.reshape(-1)[torch.tensor([2**30], device=x.device)].sum()
    return right(x)


def writes_past_its_input(x: Tensor) -> Tensor:
    """Writes one element after the last one."""
    if _wide(x) and x.is_contiguous():
        ctypes.memset(x.data_ptr() + x.numel() * x.element_size(), 1, x.element_size())
    return right(x)


def _narrow(x: Tensor) -> str | None:
    return f"{x.shape[-1]} elements (supported: {WIDTH})" if _wide(x) else None


def refuses(x: Tensor) -> Tensor:
    """Says beforehand what it can't serve, and prints where a report would be."""
    print("no report")  # noqa: T201 - kernels do
    return right(x)


def answers_wrongly(x: Tensor) -> Tensor:
    """Says yes where None or a reason is due."""
    return right(x)


refuses.supports = _narrow  # type: ignore[attr-defined]
answers_wrongly.supports = lambda x: True  # type: ignore[attr-defined]
