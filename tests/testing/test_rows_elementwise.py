"""Real bug reports of gated activations and rotary embeddings: the references are right.

A name carries the row; the right value comes from a closed form, from exact arithmetic, or from
the oracle's bound (`proven`).
"""

# ruff: noqa: N802 (rows are named as in the catalogue)

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from .rows import BF16, FP32, HALF, call, normal, proven

GATES = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")


@pytest.mark.parametrize("op", GATES)
def test_row_A1_A7_no_tokens(op: str) -> None:
    out = call(op, torch.empty(0, 32, dtype=HALF))
    assert (tuple(out.shape), out.dtype) == ((0, 16), HALF)
    proven(op, normal(3, 32))


@pytest.mark.parametrize("gate", [11.0, 20.0, 30.0, 40.0, 64.0])
def test_row_A5_a_large_gate_is_not_nan(gate: float) -> None:
    out = proven("gelu_tanh_and_mul", torch.tensor([[gate, 1.0]]))
    assert float(out[0, 0]) == gate


def test_row_A6_the_tail_of_gelu_stays_inside_its_absolute_bound() -> None:
    """-5 (1 + tanh z) / 2 is -2.2918e-7; 1 + tanh cancels, so 3 units of 5 are granted."""
    for dtype in (FP32, torch.float64):
        out = proven("gelu_tanh_and_mul", torch.tensor([[-5.0, 1.0]], dtype=dtype))
    assert math.isclose(float(out[0, 0]), -2.291796e-7, rel_tol=1e-6)
    erf = proven("gelu_and_mul", torch.tensor([[-5.0, 1.0]], dtype=torch.float64))
    assert math.isclose(float(erf[0, 0]), -1.433258e-6, rel_tol=1e-6)


def cache(positions: int, rotary_dim: int, base: float = 10000.0) -> Tensor:
    """Cosines and sines, computed in float64."""
    inverse = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(positions, dtype=torch.float64).unsqueeze(1) * inverse
    return torch.cat([angle.cos(), angle.sin()], -1).float()


def test_row_R1_positions_of_both_widths() -> None:
    q, k, table = normal(5, 4, 64), normal(5, 2, 64, seed=1), cache(128, 64)
    positions = torch.tensor([0, 1, 17, 99, 127])
    wide = proven("apply_rope", q, k, table, positions)
    narrow = call("apply_rope", q, k, table, positions.int())
    assert all(torch.equal(a, b) for a, b in zip(wide, narrow, strict=True))


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=["R2", "R3"])
def test_row_R2_R3_a_narrow_cache_is_refused(dtype: torch.dtype) -> None:
    q = normal(2, 1, 8, dtype=dtype)
    with pytest.raises(TypeError, match=r"cos_sin_cache.*float32"):
        call("apply_rope", q, q.clone(), cache(8, 8).to(dtype), torch.tensor([0, 1]))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 16), (64, 32), (256, 64)])
@pytest.mark.parametrize("is_neox", [True, False])
def test_row_R5_R6_R7_R9_partial_rotation(head_dim: int, rotary_dim: int, is_neox: bool) -> None:
    """The tail is copied, and pairs are (i, i + rotary_dim / 2), not (i, i + head_dim / 2)."""
    q, k = normal(3, 2, head_dim), normal(3, 1, head_dim, seed=1)
    table, positions = cache(32, rotary_dim), torch.tensor([3, 0, 31])
    out, _ = proven("apply_rope", q, k, table, positions, is_neox)
    assert torch.equal(out[..., rotary_dim:], q[..., rotary_dim:])
    alone, _ = call(
        "apply_rope", q[..., :rotary_dim], k[..., :rotary_dim], table, positions, is_neox
    )
    assert torch.equal(out[..., :rotary_dim], alone)


def test_row_R10_R11_positions_are_integers() -> None:
    """cos(15962) is -0.9080; 15962 in bfloat16 is 15936, whose cosine is -0.2680."""
    q, table = torch.zeros(1, 1, 2), cache(16000, 2)
    q[0, 0, 0] = 1.0
    out, _ = proven("apply_rope", q, q.clone(), table, torch.tensor([15962]))
    assert math.isclose(float(out[0, 0, 0]), math.cos(15962), abs_tol=1e-6)
    assert math.isclose(math.cos(15962), -0.908016, abs_tol=1e-6)
    with pytest.raises(TypeError, match=r"positions.*int32"):
        call("apply_rope", q, q.clone(), table, torch.tensor([15962.0]).bfloat16())


def test_row_R13_a_batch_of_single_tokens_is_each_alone() -> None:
    q, k, table = normal(2, 4, 32), normal(2, 2, 32, seed=1), cache(64, 32)
    positions = torch.tensor([5, 40])
    both = call("apply_rope", q, k, table, positions)
    for i in range(2):
        one = call("apply_rope", q[i : i + 1], k[i : i + 1], table, positions[i : i + 1])
        assert all(torch.equal(a[i : i + 1], b) for a, b in zip(both, one, strict=True))
