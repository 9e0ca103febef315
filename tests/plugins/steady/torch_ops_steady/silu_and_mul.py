"""Rounds the last bit at random, and promises nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.contiguous().double().chunk(2, -1)
    out = gate * torch.sigmoid(gate) * up
    moved = torch.randint_like(out, 0, 2) * torch.finfo(x.dtype).eps / 16
    return (out * (1 + moved)).to(x.dtype)
