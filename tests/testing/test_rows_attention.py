"""Real bug reports of attention and merging: the references give the right value.

A name carries the row; the right value comes from a closed form, from exact arithmetic, or from
the oracle's bound (`proven`).
"""

# ruff: noqa: N802 (rows are named as in the catalogue)

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import torch_ops

from .rows import BF16, FP32, HALF, INF, call, normal, proven


def states(lse_a: float, lse_b: float, value: float = 0.0) -> tuple[Tensor, ...]:
    v = torch.full((1, 1, 4), value)
    return v, torch.tensor([[lse_a]]), v.clone(), torch.tensor([[lse_b]])


def test_row_T1_two_empty_states_merge_to_an_empty_one() -> None:
    v, s = call("merge_state", *states(-INF, -INF))
    assert torch.equal(v, torch.zeros(1, 1, 4))
    assert float(s) == -INF


@pytest.mark.parametrize("empty", [-INF, INF])
@pytest.mark.parametrize("payload", [0.0, 7.0, math.nan])
def test_row_T2_either_sign_of_infinity_means_empty(empty: float, payload: float) -> None:
    v, s = call("merge_state", *states(empty, empty, payload))
    assert torch.equal(v, torch.zeros(1, 1, 4))
    assert float(s) == -INF


def test_row_T3_an_empty_chunk_has_no_weight() -> None:
    v_a, s_a = normal(3, 2, 8), normal(3, 2, seed=1)
    v, s = call("merge_state", v_a, s_a, torch.full((3, 2, 8), 9.0), torch.full((3, 2), -INF))
    assert torch.equal(v, v_a)
    assert torch.equal(s, s_a)


def test_row_T5_more_queries_than_keys_causal() -> None:
    q, k, v = normal(1, 4, 2, 16), normal(1, 2, 2, 16, seed=1), normal(1, 2, 2, 16, seed=2)
    out, lse = proven("attention_with_lse", q, k, v, True)
    assert torch.equal(out[:, :2], torch.zeros(1, 2, 2, 16))
    assert bool((lse[:, :2] == -INF).all())
    assert torch.equal(out[:, 2], v[:, 0])  # the first query with a key sees that key alone


@pytest.mark.parametrize("dtype", [FP32, HALF, BF16])
def test_row_T7_T13_no_keys(dtype: torch.dtype) -> None:
    q, none = normal(2, 3, 4, 8, dtype=dtype), torch.empty(2, 0, 2, 8, dtype=dtype)
    out, lse = call("attention_with_lse", q, none, none.clone())
    assert torch.equal(out, torch.zeros_like(q))
    assert bool((lse == -INF).all())


@pytest.mark.parametrize("queries", [76, 34, 146])
def test_row_T9_causal_with_one_key(queries: int) -> None:
    q, k = normal(1, queries, 1, 32, dtype=HALF), normal(1, 1, 1, 32, dtype=HALF, seed=1)
    v = normal(1, 1, 1, 32, dtype=HALF, seed=2)
    out = proven("attention", q, k, v, True)
    assert torch.equal(out[:, :-1], torch.zeros_like(out[:, :-1]))
    assert torch.equal(out[:, -1:], v)


def test_row_T15_garbage_at_hidden_keys_changes_nothing() -> None:
    q, k, v = normal(1, 4, 1, 8), normal(1, 4, 1, 8, seed=1), normal(1, 4, 1, 8, seed=2)
    before = call("attention", q, k, v, True)
    k[:, 3], v[:, 3] = 1e30, -1e30
    assert torch.equal(call("attention", q, k, v, True)[:, :3], before[:, :3])


def test_row_T19_inner_stride_of_two() -> None:
    q, k, v = (normal(1, 9, 2, 64, 2, seed=i) for i in range(3))
    strided = call("attention", q[..., 0], k[..., 0], v[..., 0])
    dense = call("attention", *(t[..., 0].contiguous() for t in (q, k, v)))
    assert torch.equal(strided, dense)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(24, 8), (40, 8), (28, 4), (24, 4), (32, 2), (48, 8)]
)
def test_row_T21_T22_any_group_of_query_heads(heads: int, kv_heads: int) -> None:
    q = normal(1, 3, heads, 16)
    k, v = normal(1, 9, kv_heads, 16, seed=1), normal(1, 9, kv_heads, 16, seed=2)
    out = proven("attention", q, k, v)
    group = heads // kv_heads
    repeated = proven("attention", q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
    assert torch.allclose(out, repeated, rtol=0, atol=1e-6)


def test_row_T29_soft_cap_comes_before_the_mask() -> None:
    """With a cap of 1 after the mask, a hidden key would weigh exp(-1) of the largest."""
    q, k = 4 * normal(1, 6, 1, 8), 4 * normal(1, 6, 1, 8, seed=1)
    eye = torch.eye(6).view(1, 6, 1, 6)
    weights = proven("attention", q, k, eye, True, None, -1, 1.0)[0, :, 0]
    assert torch.equal(weights.triu(1), torch.zeros(6, 6))
    assert bool((weights.tril() > 0).sum() == 21)


@pytest.mark.parametrize(("window_left", "seen"), [(0, 1), (2, 3), (5, 6)])
def test_row_T30_a_window_counts_keys_before_the_query(window_left: int, seen: int) -> None:
    q, k = normal(1, 8, 1, 8), normal(1, 8, 1, 8, seed=1)
    eye = torch.eye(8).view(1, 8, 1, 8)
    weights = proven("attention", q, k, eye, True, None, window_left)[0, :, 0]
    assert [int((row > 0).sum()) for row in weights] == [min(i + 1, seen) for i in range(8)]


def test_row_T38_more_than_4096_tokens() -> None:
    q, k, v = (normal(1, 4099, 1, 8, seed=i) for i in range(3))
    out, lse = call("attention_with_lse", q, k, v, True)
    assert bool(out.isfinite().all())
    assert bool(lse.isfinite().all())
    last, last_lse = proven("attention_with_lse", q[:, -2:], k, v, True)
    assert torch.allclose(out[:, -2:], last, rtol=0, atol=1e-6)
    assert torch.allclose(lse[:, -2:], last_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "head_dim"), [(HALF, 128), (BF16, 64), (BF16, 256)])
def test_row_T39_a_decoded_token_is_the_prefilled_row(dtype: torch.dtype, head_dim: int) -> None:
    q, k, v = (normal(1, 65, 2, head_dim, dtype=dtype, seed=i) for i in range(3))
    rows = proven("attention", q, k, v, True)
    last = proven("attention", q[:, -1:], k, v, True)
    step = torch.finfo(dtype).eps
    assert torch.allclose(last.float(), rows[:, -1:].float(), rtol=step, atol=step)


def test_row_T43_large_queries() -> None:
    q, k, v = (
        100 * normal(1, 4, 2, 64),
        normal(1, 256, 2, 64, seed=1),
        normal(1, 256, 2, 64, seed=2),
    )
    out, lse = proven("attention_with_lse", q, k, v)
    assert bool(out.isfinite().all())
    assert bool(lse.isfinite().all())


def test_row_T46_more_than_32768_keys() -> None:
    zeros = torch.zeros(1, 33728, 1, 64)
    out, lse = call("attention_with_lse", torch.zeros(1, 1, 1, 64), zeros, zeros.clone())
    assert torch.equal(out, torch.zeros(1, 1, 1, 64))
    assert math.isclose(float(lse), math.log(33728), rel_tol=1e-6)


def test_row_T49_causal_with_constant_values_is_that_constant() -> None:
    q, k = normal(2, 33, 2, 64, dtype=BF16), normal(2, 33, 2, 64, dtype=BF16, seed=1)
    v = torch.full((2, 33, 2, 64), 0.75, dtype=BF16)
    assert torch.equal(call("attention", q, k, v, True), v)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("torch", HALF), ("torch", BF16), ("torch", FP32), ("torch", torch.float64),
        ("inductor", FP32),
    ],
)  # fmt: skip
def test_merging_the_largest_numbers_gives_numbers(backend: str, dtype: torch.dtype) -> None:
    """Weights add up to more than 1 after rounding, and a plain sum overflows before division."""
    largest = torch.finfo(dtype).max
    v = torch.full((64, 3, 5), largest, dtype=dtype)
    s_a, s_b = normal(64, 3), normal(64, 3)
    for sign in (1, -1):
        merged, _ = torch_ops.ops.merge_state(sign * v, s_a, sign * v, s_b, backend=backend)
        assert torch.equal(merged, sign * v)
    between, _ = torch_ops.ops.merge_state(v, s_a, -v, s_b, backend=backend)
    assert between.isfinite().all()
    assert torch.equal(between > 0, (s_a > s_b).unsqueeze(-1).expand(v.shape))
