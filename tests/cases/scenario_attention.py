"""Rows of attention and of merging its states: what each kernel has to get right."""

from __future__ import annotations

import math

import torch

from .kernels import BF16, FP32, HALF, INF, Kernels, Outputs, judge, require, same
from .scenario import scenario

OUT = ("attention",)
LSE = ("attention_with_lse",)
MERGE = ("merge_state",)
DTYPES = (HALF, BF16, FP32)
TWO = (HALF, FP32)  # each dtype of attention costs a compiler a minute


def _inputs(
    kernels: Kernels, dtype: torch.dtype, queries: int, keys: int, heads: int = 2,
    kv_heads: int = 2, head_dim: int = 128, batch: int = 1,
) -> Outputs:  # fmt: skip
    q = kernels.normal(batch, queries, heads, head_dim, dtype=dtype)
    k, v = (kernels.normal(batch, keys, kv_heads, head_dim, dtype=dtype, seed=i) for i in (1, 2))
    return q, k, v


@scenario("T1", "T2", ops=MERGE, dtypes=DTYPES)
def two_empty_states(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """Of either sign of infinity, with any values."""
    for empty in (-INF, INF):
        for payload in (0.0, 7.0, math.nan):
            v, s = kernels.full((2, 3, 64), payload, dtype), kernels.full((2, 3), empty)
            out, lse = kernels(op, v, s, v.clone(), s.clone())
            same("T1", out, torch.zeros_like(v))
            require(f"T1: {lse}", (lse == -INF).all())


@scenario("T3", ops=MERGE, dtypes=DTYPES)
def an_empty_chunk_has_no_weight(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    v, s = kernels.normal(3, 2, 64, dtype=dtype), kernels.normal(3, 2, seed=1)
    for payload in (9.0, math.nan):
        empty = kernels.full((3, 2, 64), payload, dtype), kernels.full((3, 2), -INF)
        same("T3", kernels(op, v, s, *empty), (v, s))
        same("T3", kernels(op, *empty, v, s), (v, s))


@scenario("T5", "T9", ops=LSE, dtypes=TWO)
def causal_with_more_queries_than_keys(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """Queries before the first key see nothing; the next one sees that key alone."""
    for queries, keys in ((4, 2), (76, 1), (34, 1), (146, 1), (150, 7)):
        q, k, v = _inputs(kernels, dtype, queries, keys)
        out, lse = kernels.proven(op, q, k, v, True)
        unseen = queries - keys
        same("T5", out[:, :unseen], torch.zeros_like(out[:, :unseen]))
        require(f"T5: {lse[:, :unseen]}", (lse[:, :unseen] == -INF).all())
        same("T5", out[:, unseen], v[:, 0])


@scenario("T6", ops=LSE, dtypes=TWO)
def no_keys_at_all(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """Outputs are written although there is nothing to read; memory is full of NaN before."""
    q, k, v = _inputs(kernels, dtype, 5, 0)
    out, lse = kernels(op, q, k, v)
    same("T6", out, torch.zeros_like(q))
    require(f"T6: {lse}", (lse == -INF).all())


@scenario("T18", ops=OUT, dtypes=(BF16, FP32))
def keys_that_heads_share_by_a_stride_of_zero(
    kernels: Kernels, op: str, dtype: torch.dtype
) -> None:
    q, k, v = _inputs(kernels, dtype, 9, 33, heads=4, kv_heads=1)
    shared = [t.expand(1, 33, 4, 128) for t in (k, v)]
    found = kernels.takes(op, q, *shared)
    if found is not None:
        judge(op, (q, *shared), found)
        same("T18", found, kernels(op, q, *(t.contiguous() for t in shared)))
    for layout in ("row_stride", "qkv_split", "unbind"):
        placed = [kernels.place(t, layout) for t in (q, k, v)]
        found = kernels.takes(op, *placed)
        if found is not None:
            judge(op, placed, found)


@scenario("T21", "T22", ops=OUT, dtypes=(HALF, BF16))
def any_number_of_query_heads_for_a_key_head(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    for heads, kv_heads in ((24, 8), (40, 8), (28, 4), (24, 4), (32, 2), (48, 8)):
        kernels.proven(op, *_inputs(kernels, dtype, 3, 9, heads, kv_heads))


@scenario("T29", ops=LSE, dtypes=TWO)
def a_soft_cap_comes_before_the_mask(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """With V the identity the output is P: a hidden key would weigh exp(-1) of the largest."""
    q, k, _ = _inputs(kernels, dtype, 128, 128, heads=1, kv_heads=1)
    eye = torch.eye(128, dtype=dtype, device=kernels.device).view(1, 128, 1, 128)
    for cap in (1.0, 5.0):
        args = 4 * q, 4 * k, eye, True, None, -1, cap
        weights = kernels.proven(op, *args)[0][0, :, 0]
        same("T29", weights.triu(1), torch.zeros_like(weights))
        seen = weights.tril() > 0
        require("T29: a key that is seen has no weight", seen.sum() == 128 * 129 / 2)


@scenario("T37", ops=OUT, dtypes=[HALF], gigabytes=64)
def sequences_past_31_bits(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    heads, head_dim = (32, 256) if kernels.far >= 2**31 else (2, 64)
    batch = kernels.far // (16 * heads * head_dim) + 2
    q = kernels.full((batch, 16, heads, head_dim), 0.0, dtype)
    k, v = (kernels.full((batch, 16, 1, head_dim), 0.0, dtype) for _ in range(2))
    last = slice(batch - 3, batch)  # one of them before the limit
    for seed, tensor in enumerate((q, k, v)):
        tensor[last] = kernels.normal(*tensor[last].shape, dtype=dtype, seed=seed)
    found = kernels(op, q, k, v, True)
    judge(op, (*(t[last].clone() for t in (q, k, v)), True), [out[last] for out in found])


@scenario("T39", ops=LSE, dtypes=(HALF, BF16))
def a_decoded_token_is_the_prefilled_one(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    for head_dim in (128,) if dtype == HALF else (64, 256):
        q, k, v = _inputs(kernels, dtype, 512, 512, head_dim=head_dim)
        rows = kernels(op, q, k, v, True)
        last = q[:, -1:].clone(), k, v, True
        judge(op, last, [out[:, -1:] for out in rows])
        kernels.proven(op, *last)


@scenario("T43", ops=LSE, dtypes=TWO)
def queries_of_a_hundred(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    q, k, v = _inputs(kernels, dtype, 4, 256)
    for result in kernels.proven(op, 100 * q, k, v):
        require("T43: an infinity or NaN", result.isfinite().all())


@scenario("T46", ops=LSE, dtypes=TWO)
def more_keys_than_16_bits_count(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    q, k = kernels.full((1, 1, 1, 128), 0.0, dtype), kernels.full((1, 33728, 1, 128), 0.0, dtype)
    out, lse = kernels.proven(op, q, k, k.clone())
    same("T46", out, torch.zeros_like(q))
    require(f"T46: {lse}", math.isclose(float(lse), math.log(33728), rel_tol=1e-6))


@scenario("T49", ops=OUT, dtypes=(HALF, BF16))
def constant_values_come_out_as_they_are(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    for queries in (33, 150):
        q, k, v = _inputs(kernels, dtype, queries, queries, batch=2)
        v = torch.full_like(v, 0.75)
        same("T49", kernels(op, q, k, v, True)[0], v)
