"""Rows of packed sequences, page tables and caches: what each kernel has to get right.

In bfloat16, which Triton's interpreter doesn't compute as a GPU does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .kernels import BF16, Kernels, Outputs, require, same
from .scenario import scenario

PAGED = ("paged_decode", "paged_prefill")
APPEND = ("append_paged_kv_",)
LATENTS = ("mla_decode",)
PACKED = ("varlen_attention_with_lse",)


def _int32(kernels: Kernels, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=kernels.device)


def _rows(kernels: Kernels, op: str, count: int) -> Outputs:
    """Bounds of one query a sequence, where the op takes any."""
    return (_int32(kernels, *range(count + 1)),) if op == "paged_prefill" else ()


@scenario("T10", "T11", ops=PACKED, dtypes=[BF16])
def sequences_without_queries_or_keys(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """Anywhere in a batch."""
    for queries, keys in (((0, 1, 0, 1), (0, 3, 0, 5)), ((0, 33, 4, 0), (7, 0, 150, 9))):
        q = kernels.normal(sum(queries), 9, 64, dtype=dtype)
        k, v = (kernels.normal(sum(keys), 3, 64, dtype=dtype, seed=i) for i in (1, 2))
        bounds = [
            _int32(kernels, *torch.tensor([0, *sizes]).cumsum(0).tolist())
            for sizes in (queries, keys)
        ]
        for causal in (False, True):
            kernels.proven(op, q, k, v, *bounds, max(queries), max(keys), causal)


@scenario("T25", "T26", ops=PAGED, dtypes=[BF16])
def unused_slots_hold_nan(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """Sequences of 21, 0, 16 and 0 tokens in pages of 16; the rest of the cache is NaN."""
    caches = [kernels.full((6, 16, 2, 128), math.nan, dtype) for _ in range(2)]
    for seed, cache in enumerate(caches):
        cache[4] = kernels.normal(16, 2, 128, dtype=dtype, seed=seed)
        cache[1, :5] = kernels.normal(5, 2, 128, dtype=dtype, seed=seed + 2)
        cache[3] = kernels.normal(16, 2, 128, dtype=dtype, seed=seed + 4)
    table = (0, 2, 2, 3, 3), (4, 1, 3), (5, 16, 16, 1)
    q, rows = kernels.normal(4, 8, 128, dtype=dtype, seed=9), _rows(kernels, op, 4)
    (out,) = kernels.proven(op, q, *caches, *rows, *(_int32(kernels, *part) for part in table))
    same("T26", out[[1, 3]], torch.zeros_like(out[[1, 3]]))
    require("T25: an infinity or NaN", out.isfinite().all())


def _far_pages(kernels: Kernels, dtype: torch.dtype) -> Tensor:
    """A cache of threes that is large, in pages more than 16 bits count."""
    shape = (16, 8, 128) if kernels.far >= 2**31 else (1, 1, 8)
    pages = max(kernels.far // math.prod(shape) + 3, 66_000)
    return kernels.full((pages, *shape), 3.0, dtype)


@scenario("T34", "T35", ops=PAGED, dtypes=[BF16], gigabytes=8)
def pages_past_16_and_31_bits(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    cache = _far_pages(kernels, dtype)
    pages, size, heads, head_dim = cache.shape
    cache[-1], cache[-2] = 0.75, 0.5
    q, rows = kernels.normal(2, heads, head_dim, dtype=dtype), _rows(kernels, op, 2)
    table = (0, 1, 2), (pages - 1, pages - 2), (size, size)
    (out,) = kernels(op, q, cache, cache, *rows, *(_int32(kernels, *part) for part in table))
    same("T34", out, torch.stack([torch.full_like(q[0], 0.75), torch.full_like(q[0], 0.5)]))


@scenario("T6", "T25", "T43", ops=LATENTS, dtypes=[BF16])
def latents_of_large_queries(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """Sequences of 5, 0 and 700 tokens in one cache of latents and rotated parts; else NaN."""
    pool = kernels.full((14, 64, 576), math.nan, dtype)
    pool[1:12] = kernels.normal(11, 64, 576, dtype=dtype)
    pool[11, 60:] = math.nan  # of 700 tokens the last page has 60
    pool[12, :5] = kernels.normal(5, 576, dtype=dtype, seed=1)
    indices = _int32(kernels, 12, *range(1, 12))
    table = _int32(kernels, 0, 1, 1, 12), indices, _int32(kernels, 5, 64, 60)
    for size in (1.0, 100.0):
        q = size * kernels.normal(3, 16, 576, dtype=dtype, seed=2)
        parts = q[..., :512], q[..., 512:], pool[..., :512], pool[..., 512:]
        (out,) = kernels.proven(op, *parts, *table, 0.07)
        same("T6", out[1], torch.zeros_like(out[1]))
        require("T25, T43: an infinity or NaN", out.isfinite().all())


@scenario("T34", "T35", ops=LATENTS, dtypes=[BF16], gigabytes=8)
def latents_past_16_and_31_bits(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """In one cache with the rotated parts; pages of 480 tokens where memory suffices."""
    large = kernels.far >= 2**31
    size, latent, rotated = (480, 512, 64) if large else (1, 16, 8)
    pages = kernels.far // (size * (latent + rotated)) + 3 if large else 66_000
    pool = kernels.full((pages, size, latent + rotated), 3.0, dtype)
    pool[-1], pool[-2] = 0.75, 0.5
    q = [kernels.normal(2, 16, width, dtype=dtype) for width in (latent, rotated)]
    table = (0, 1, 2), (pages - 1, pages - 2), (size, size)
    caches = pool[..., :latent], pool[..., latent:]
    (out,) = kernels(op, *q, *caches, *(_int32(kernels, *part) for part in table), 0.125)
    same("T34", out, torch.stack([torch.full_like(q[0][0], n) for n in (0.75, 0.5)]))


@scenario("T35", ops=APPEND, dtypes=[BF16], gigabytes=32)
def slots_past_31_bits(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    cache = _far_pages(kernels, dtype)
    pages, size, heads, head_dim = cache.shape
    k = kernels.normal(3, heads, head_dim, dtype=dtype)
    v = kernels.normal(3, heads, head_dim, dtype=dtype, seed=1)
    slots = torch.tensor([pages * size - 1, -1, (pages - 2) * size], device=kernels.device)
    written = kernels(op, k, v, cache, cache.clone(), slots)
    for found, rows in zip(written, (k, v), strict=True):
        same("T35", found[-1, -1], rows[0])
        same("T35", found[-2, 0], rows[2])
        require(
            "T35: another slot was written", (found != 3.0).sum() == (rows[[0, 2]] != 3.0).sum()
        )


@scenario("K1", "K2", ops=APPEND, dtypes=[BF16])
def caches_in_a_packed_buffer(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """Keys and values side by side in a page; some rows are padding."""
    for layout in ("unbind", "qkv_split"):
        caches = [
            kernels.place(kernels.normal(6, 4, 2, 64, dtype=dtype, seed=i), layout) for i in (0, 1)
        ]
        k, v = (kernels.normal(7, 2, 64, dtype=dtype, seed=i) for i in (2, 3))
        slots = torch.tensor([23, -1, 0, 7, -5, 12, 2], device=kernels.device)
        kernels.proven(op, k, v, *caches, slots)
