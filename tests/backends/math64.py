"""What the models of packages compute with: plain formulas in float64, rounded once."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * gain`` over the last axis."""
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain


def activated(name: str, gate: Tensor) -> Tensor:
    """One of silu, gelu and gelu_tanh."""
    wide = gate.double()
    if name == "silu":
        return wide * torch.sigmoid(wide)
    return torch.nn.functional.gelu(wide, approximate="tanh" if name == "gelu_tanh" else "none")


def rotated(x: Tensor, cache: Tensor, positions: Tensor, is_neox: bool) -> Tensor:
    """``[T, H, D]`` with its first elements rotated, cosines before sines in the cache."""
    width = cache.shape[1]
    cos, sin = cache.double()[positions.long()].unsqueeze(1).chunk(2, -1)
    out = x.double()
    halves = (slice(0, width // 2), slice(width // 2, width))
    first, second = halves if is_neox else (slice(0, width, 2), slice(1, width, 2))
    a, b = out[..., first].clone(), out[..., second].clone()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def attended(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window_left: int
) -> tuple[Tensor, Tensor]:
    """``[S, H, D]`` and the LSE in base 2; queries stand at the last keys."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("shd,nhd->hsn", q.double(), keys) * scale
    place = torch.arange(q.shape[0]).unsqueeze(1) + k.shape[0] - q.shape[0]
    key = torch.arange(k.shape[0]).unsqueeze(0)
    if causal:
        logits = logits.masked_fill(key > place, -math.inf)
    if window_left >= 0:
        logits = logits.masked_fill(key < place - window_left, -math.inf)
    out = torch.einsum("hsn,nhd->shd", logits.softmax(-1), values)
    lse = logits.logsumexp(-1).T / math.log(2)
    return out, lse


def merged(
    v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, base: float
) -> tuple[Tensor, Tensor]:
    """Two states; NaN where both are empty, as kernels give it that subtract the larger LSE."""
    a, b = s_a.double() * math.log(base), s_b.double() * math.log(base)
    top = torch.maximum(a, b)
    weights = torch.exp(a - top), torch.exp(b - top)
    total = weights[0] + weights[1]
    v = v_a.double() * (weights[0] / total).unsqueeze(-1)
    v += v_b.double() * (weights[1] / total).unsqueeze(-1)
    return v, (total.log() + top) / math.log(base)
