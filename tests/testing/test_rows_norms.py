"""Real bug reports of norms: the references give the right value.

A name carries the row; the right value comes from a closed form, from exact arithmetic, or from
the oracle's bound (`proven`).
"""

# ruff: noqa: N802 (rows are named as in the catalogue)

from __future__ import annotations

import math

import pytest
import torch

from torch_ops.declarations import catalogue
from torch_ops.testing import proof_of
from torch_ops.testing.layouts import place

from .rows import BF16, FP32, HALF, call, normal, proven


@pytest.mark.parametrize("hidden", [3584, 16384], ids=["N1", "N2"])
def test_row_N1_N2_wide_rows_of_float16(hidden: int) -> None:
    x, residual = normal(3, hidden, dtype=HALF), normal(3, hidden, dtype=HALF, seed=1)
    out, total = proven("fused_add_rms_norm", x, residual, normal(hidden, dtype=HALF, seed=2))
    assert bool(out.isfinite().all())
    assert torch.equal(total, (x.float() + residual.float()).half())


def test_row_N3_row_stride_past_32_bits() -> None:
    x, weight = normal(1, 128, dtype=BF16), normal(128, dtype=BF16, seed=1)
    far = x.as_strided((1, 128), (2**31, 1))
    assert torch.equal(call("rms_norm", far, weight), call("rms_norm", x, weight))


def test_row_N6_residual_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fused_add_rms_norm.*residual"):
        call("fused_add_rms_norm", normal(128, 32), normal(128, 16), normal(32))


def test_row_N7_one_rounding_with_a_residual_too() -> None:
    """The declared policy rounds once; rounding before the weight differs and is outside it."""
    x, weight = normal(64, 96, dtype=BF16), normal(96, dtype=BF16, seed=1)
    out, total = proven("fused_add_rms_norm", x, torch.zeros_like(x), weight)
    assert torch.equal(total, x)
    twice = call("rms_norm", total, None, 1e-6) * weight
    assert not torch.equal(out, twice)


def test_row_N9_the_fused_op_is_the_composite_bit_for_bit() -> None:
    for dtype in (BF16, HALF, FP32):
        x, residual = normal(33, 257, dtype=dtype), normal(33, 257, dtype=dtype, seed=1)
        weight = normal(257, dtype=dtype, seed=2)
        out, total = call("fused_add_rms_norm", x, residual, weight)
        assert torch.equal(out, call("rms_norm", total, weight))


@pytest.mark.parametrize("hidden", [768, 769])
def test_row_N10_odd_width_leaves_following_rows_alone(hidden: int) -> None:
    x = normal(7, hidden, dtype=HALF)
    out = proven("rms_norm", x)
    for i in range(7):
        assert torch.equal(out[i], call("rms_norm", x[i]))


def test_row_N11_rounding_to_nearest_has_no_bias() -> None:
    """Mean signed relative error by its standard error: truncation is at -50 here, not within 6."""
    x = normal(1024, 64).abs().bfloat16() + 1
    residual = normal(1024, 64, seed=1).abs().bfloat16() + 1
    out, total = call("fused_add_rms_norm", x, residual, torch.ones(64, dtype=BF16))
    (exact, _) = proof_of("fused_add_rms_norm").oracle(
        {"x": x, "residual": residual, "weight": torch.ones(64, dtype=BF16), "eps": 1e-6},
        catalogue()["fused_add_rms_norm"].contract,
    )
    sums = x.double() + residual.double()
    for got, want in ((out.double(), exact.value), (total.double(), sums)):
        error = (got - want) / want.abs()
        assert abs(float(error.mean() / (error.std() / error.numel() ** 0.5))) < 6


def test_row_N13_small_variance_in_bfloat16() -> None:
    """x / sqrt(x^2 + eps) is 0.9998, which is 1 in bfloat16; an eps of bfloat16 gives 0.49."""
    constant = torch.full((2, 64), 0.05, dtype=BF16)
    assert bool((proven("rms_norm", constant, None, 1e-6) == 1).all())
    proven("rms_norm", normal(4, 512, dtype=BF16) * 0.058, None, 1e-6)


def test_row_N14_one_plus_weight_is_added_in_float32() -> None:
    x = torch.full((1, 8), 2.0, dtype=FP32)
    gain = proven("gemma_rms_norm", x, torch.full((8,), 15.8125, dtype=BF16), 0.0)
    assert bool((gain == 16.8125).all())


def test_row_N15_a_small_weight_is_not_lost() -> None:
    weight = torch.full((8,), 0.05, dtype=BF16)
    gain = proven("gemma_rms_norm", torch.ones(1, 8), weight, 0.0)
    assert bool((gain == 1 + float(weight[0])).all())
    assert abs(float(gain[0, 0]) - 1.050049) < 1e-6


def test_row_N17_last_stride_is_not_one() -> None:
    a = normal(2, 2)
    assert torch.equal(call("rms_norm", a.t()), call("rms_norm", a.t().contiguous()))


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "gemma_rms_norm"])
def test_row_N19_seven_by_seven_layouts(op: str) -> None:
    layouts = ("contig", "row_stride", "transposed", "slice_offset", "misalign", "step2", "unbind")
    x, weight = normal(6, 10), normal(10, seed=1)
    expected = call(op, x, weight)
    for layout in layouts:
        for other in layouts:
            placed = place(x, layout), place(weight, "step2" if other == "transposed" else other)
            assert torch.equal(call(op, *placed), expected)


@pytest.mark.parametrize("hidden", [3, 17])
def test_row_N25_padding_is_not_counted(hidden: int) -> None:
    proven("layer_norm", normal(5, hidden) + 3, None, None, 1e-5)


def test_row_N26_one_pass_variance_is_negative() -> None:
    """9.7647e-5 is (n - 1) / n^2; the last element is -(n - 1) / n over the root with eps."""
    n = 10240
    x = torch.full((n,), 256.0)
    x[-1] = 255.0
    out = proven("layer_norm", x, None, None, 1e-5)
    variance = (n - 1) / n**2
    assert math.isclose(float(out[-1]), -(n - 1) / n / math.sqrt(variance + 1e-5), rel_tol=1e-3)
    assert math.isclose(variance, 9.7647e-5, rel_tol=1e-4)


def test_row_N27_a_constant_row_is_the_bias() -> None:
    x, bias = torch.full((3, 256), 1234.0), normal(256)
    assert torch.equal(call("layer_norm", x, None, None), torch.zeros(3, 256))
    assert torch.equal(call("layer_norm", x, None, bias), bias.expand(3, 256))


def test_row_N29_a_small_variance_beside_a_large_mean() -> None:
    x = normal(2, 32768).double() * 0.01 + 100
    out = proven("layer_norm", x.float(), None, None, 1e-12)
    assert abs(float(out.double().var(unbiased=False)) - 1) < 1e-2


@pytest.mark.parametrize("size", [1e19, 1e30])
def test_row_N30_a_variance_that_overflows_gives_no_nan(size: float) -> None:
    x = (normal(2, 1024).double() * size).float()
    out = call("layer_norm", x, None, None)
    assert bool(out.isfinite().all())
    assert float(out.abs().max()) <= 1024**0.5


@pytest.mark.xfail(
    strict=True, reason="the sum of a row overflows float32 (pytorch/pytorch#173793)"
)
def test_row_N31_a_constant_near_the_largest_float_is_the_bias() -> None:
    out = call("layer_norm", torch.full((1, 768), 8.5e37), None, None)
    assert torch.equal(out, torch.zeros(1, 768))


@pytest.mark.parametrize("dtype", [HALF, BF16, FP32])
def test_row_N34_a_zero_row_with_a_tiny_eps(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 64, dtype=dtype)
    for op in ("rms_norm", "layer_norm"):
        args = (x, None, 1e-12) if op == "rms_norm" else (x, None, None, 1e-12)
        assert torch.equal(call(op, *args), x)


def test_row_N35_eps_is_not_rescaled_by_the_largest_element() -> None:
    spiky = torch.zeros(2, 64)
    spiky[0, 3], spiky[0, 4] = 1000.0, 1e-3
    out = proven("rms_norm", spiky, None, 0.5)
    assert torch.equal(out[1], torch.zeros(64))
