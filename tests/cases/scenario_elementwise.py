"""Rows of gated activations and rotary embeddings: what each kernel has to get right."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import BF16, FP32, HALF, Kernels, judge, require, same
from .scenario import scenario

GATES = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")
GROUPED = "silu_and_mul_quant_fp8_per_group"
ROPES = ("apply_rope", "apply_rope_")
DTYPES = (HALF, BF16, FP32)


@scenario("A1", "A7", ops=GATES, dtypes=DTYPES)
def no_tokens_and_then_some(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """A launch of no blocks fails, and that failure may surface in the next call."""
    for half in (16, 64):
        x = kernels.normal(3, 2 * half, dtype=dtype)
        found = kernels.takes(op, x[:0])
        if found is not None:
            shape = tuple(found[0].shape)
            require(f"A1: {shape} of {found[0].dtype}", shape == (0, half))
            require(f"A1: {found[0].dtype}", found[0].dtype == dtype)
        kernels.proven(op, x)


def _last_rows(kernels: Kernels, op: str, dtype: torch.dtype, width: int, *more: int) -> None:
    width = width if kernels.far >= 2**31 else 64
    rows = kernels.far // width + 8
    x = kernels.full((rows, width), 0.0, dtype)
    last = slice(rows - 9, rows)  # one of them before the limit
    x[last] = kernels.normal(9, width, dtype=dtype)
    found = kernels(op, x, *more)
    judge(op, (x[last].clone(), *more), [out[last] for out in found])


@scenario("A2", ops=(*GATES, GROUPED), dtypes=[HALF], gigabytes=64)
def offsets_past_31_bits_of_wide_rows(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    _last_rows(kernels, op, dtype, 34816, *([32] if op == GROUPED else []))


@scenario("A3", ops=GATES, dtypes=[HALF], gigabytes=64)
def offsets_past_31_bits_of_many_rows(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    _last_rows(kernels, op, dtype, 4096)


def _cache(kernels: Kernels, positions: int, rotary_dim: int) -> Tensor:
    """Cosines and sines, computed in float64."""
    inverse = 1e4 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(positions, dtype=torch.float64).unsqueeze(1) * inverse
    return torch.cat([angle.cos(), angle.sin()], -1).float().to(kernels.device)


@scenario("R1", ops=ROPES, dtypes=DTYPES)
def positions_of_32_and_64_bits(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    q, k = kernels.normal(5, 4, 64, dtype=dtype), kernels.normal(5, 2, 64, dtype=dtype, seed=1)
    cache = _cache(kernels, 128, 64)
    positions = torch.tensor([1, 0, 17, 99, 127], device=kernels.device)
    wide = kernels.proven(op, q, k, cache, positions)
    same("R1", kernels(op, q, k, cache, positions.int()), wide)


@scenario("R7", ops=ROPES, dtypes=DTYPES)
def a_quarter_of_a_head_is_rotated(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    q, k = kernels.normal(3, 2, 256, dtype=dtype), kernels.normal(3, 1, 256, dtype=dtype, seed=1)
    cache = _cache(kernels, 32, 64)
    positions = torch.tensor([3, 0, 31], device=kernels.device)
    for is_neox in (True, False):
        out = kernels.proven(op, q, k, cache, positions, is_neox)
        same("R7", [o[..., 64:] for o in out], [t[..., 64:] for t in (q, k)])
