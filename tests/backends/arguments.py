"""Arguments of calls, by how they lie in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_ops.attention.prepared import AttentionSpec

BRAIN, FULL, HALF = torch.bfloat16, torch.float32, torch.float16


def t(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """A tensor of any content."""
    return torch.empty(shape, dtype=dtype)


def big(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """A tensor that takes no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def off(x: Tensor, elements: int = 1) -> Tensor:
    """The same shape, so many elements into a storage that is aligned."""
    flat = torch.empty(x.numel() + elements, dtype=x.dtype)
    return flat[elements:].view(x.shape)


def strided(x: Tensor, *strides: int) -> Tensor:
    """The same shape with these strides."""
    room = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) + 1
    return torch.empty(room, dtype=x.dtype).as_strided(x.shape, strides)


def rope_args(
    heads: tuple[int, int] = (4, 2), head_dim: int = 64, rotary_dim: int = 64, tokens: int = 3,
    dtype: torch.dtype = HALF, neox: bool = True,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of a rotary embedding."""
    q, k = (t(tokens, n, head_dim, dtype=dtype) for n in heads)
    return q, k, torch.empty(10, rotary_dim), torch.zeros(tokens, dtype=torch.int64), neox


def dense(
    queries: int = 5, keys: int = 7, heads: int = 4, kv_heads: int = 2, batch: int = 1,
    head_dim: int = 64, dtype: torch.dtype = HALF,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys and values."""
    k = torch.randn(batch, keys, kv_heads, head_dim).to(dtype)
    return torch.randn(batch, queries, heads, head_dim).to(dtype), k, k.flip(1)


def spec(head_dim: int = 64, scale: float = 0.1, window: int = -1, cap: float = 0) -> AttentionSpec:
    """A causal layer of four heads."""
    return AttentionSpec(4, 2, head_dim, scale, True, window, cap)
