"""Rounds the last bit at random, and promises nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.contiguous().double().chunk(2, -1)
    out = gate * torch.sigmoid(gate) * up
    unit = torch.finfo(x.dtype).eps / 16
    return (out * (1 + unit * torch.randint(0, 2, out.shape, device=x.device))).to(x.dtype)
