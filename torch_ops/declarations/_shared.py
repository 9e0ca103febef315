"""What several references do: the accumulation dtype."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["accumulation_dtype", "upcast"]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def upcast(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Make contiguous and convert to the accumulation dtype of ``like`` (default: its own)."""
    return x.contiguous().to(accumulation_dtype((x if like is None else like).dtype))
