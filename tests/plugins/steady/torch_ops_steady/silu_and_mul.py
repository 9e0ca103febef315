"""Rounds the last bit at random, and promises nothing."""

from __future__ import annotations

import torch
from torch import Tensor

_coins = torch.Generator()


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.contiguous().double().chunk(2, -1)
    out = gate * torch.sigmoid(gate) * up
    moved = torch.randint(0, 2, out.shape, generator=_coins).to(out) * torch.finfo(x.dtype).eps / 16
    return (out * (1 + moved)).to(x.dtype)
