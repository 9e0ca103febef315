"""Real bug reports of packed sequences, page tables and caches: the references are right.

A name carries the row; the right value comes from dense attention of each sequence, from a closed
form, or from the oracle's bound (`proven`).
"""

# ruff: noqa: N802 (rows are named as in the catalogue)

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops

from .rows import BF16, FP32, HALF, INF, call, normal, proven

BEYOND = 2**31


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def bounds(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def packed(
    queries: Sequence[int], keys: Sequence[int], heads: int = 2, kv_heads: int = 2,
    head_dim: int = 16, dtype: torch.dtype = FP32,
) -> list[Any]:  # fmt: skip
    """Arguments of packed attention up to the largest lengths."""
    q = normal(sum(queries), heads, head_dim, dtype=dtype)
    k, v = (normal(sum(keys), kv_heads, head_dim, dtype=dtype, seed=i) for i in (1, 2))
    return [q, k, v, bounds(queries), bounds(keys), max(queries), max(keys)]


def paged(
    lengths: Sequence[int], page_size: int, dtype: torch.dtype = FP32, kv_heads: int = 2,
    head_dim: int = 16,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Caches of sequences of these lengths, and the table.

    Pages are listed backwards; whatever nobody lists is NaN.
    """
    counts = [-(-n // page_size) for n in lengths]
    total = sum(counts)
    tokens = [
        [normal(n, kv_heads, head_dim, dtype=dtype, seed=10 * b + i) for i in (1, 2)]
        for b, n in enumerate(lengths)
    ]
    caches = [torch.full((total + 2, page_size, kv_heads, head_dim), math.nan) for _ in range(2)]
    caches = [cache.to(dtype) for cache in caches]
    pages, first = list(range(total + 1, 1, -1)), 0
    for count, n, parts in zip(counts, lengths, tokens, strict=True):
        for cache, part in zip(caches, parts, strict=True):
            for token in range(n):
                cache[pages[first + token // page_size], token % page_size] = part[token]
        first += count
    last = [(n - 1) % page_size + 1 if n else page_size for n in lengths]
    return caches, [bounds(counts), int32(*pages), int32(*last)]


def test_row_T10_sequences_of_no_or_one_query() -> None:
    args = packed([0, 1, 0, 1], [0, 3, 0, 5], heads=9, kv_heads=3)
    out, lse = proven("varlen_attention_with_lse", *args, True)
    q, k, v = args[:3]
    for row, keys in ((0, slice(0, 3)), (1, slice(3, 8))):
        dense = (q[None, row : row + 1], k[None, keys], v[None, keys], True)
        one, one_lse = call("attention_with_lse", *dense)
        torch.testing.assert_close(out[row], one[0, 0])
        torch.testing.assert_close(lse[row], one_lse[0, 0])


@pytest.mark.parametrize("is_causal", [False, True])
def test_row_T11_sequences_without_queries_change_nothing(is_causal: bool) -> None:
    lengths = [0, 12, 0, 8, 0]
    args = packed(lengths, lengths, head_dim=256, dtype=HALF)
    out = proven("varlen_attention", *args, is_causal)
    without = [*args[:3], bounds([12, 8]), bounds([12, 8]), 12, 12]
    torch.testing.assert_close(out, proven("varlen_attention", *without, is_causal))


@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_row_T23_a_last_page_of_two_tokens(dtype: torch.dtype) -> None:
    """Pages 1, 2, 3 of 64 tokens, the last with 2 of them: 130 keys."""
    caches = [normal(5, 64, 2, 64, dtype=dtype, seed=i).transpose(1, 2) for i in (1, 2)]
    caches = [cache.contiguous().transpose(1, 2) for cache in caches]  # heads first in memory
    q, table = normal(1, 4, 64, dtype=dtype), (int32(0, 3), int32(1, 2, 3), int32(2))
    out = proven("paged_decode", q, *caches, *table)
    dense = [cache[1:4].flatten(0, 1)[None, :130] for cache in caches]
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(
        out[0], call("attention", q[None], *dense)[0, 0], rtol=step, atol=step
    )


@pytest.mark.parametrize("page_size", [4, 16])
def test_row_T25_NaN_in_unused_slots_and_pages(page_size: int) -> None:
    caches, table = paged([13, 5], page_size)
    q = normal(2, 4, 16)
    out = proven("paged_decode", q, *caches, *table)
    assert bool(out.isfinite().all())
    clean = [cache.nan_to_num(5.0) for cache in caches]
    assert torch.equal(out, call("paged_decode", q, *clean, *table))
    prefilled = call("paged_prefill", q, *caches, int32(0, 1, 2), *table)
    torch.testing.assert_close(prefilled, out)


def test_row_T26_a_sequence_without_tokens_is_zero() -> None:
    caches, table = paged([7, 0, 9, 0], 4)
    out = proven("paged_decode", normal(4, 2, 16), *caches, *table)
    assert torch.equal(out[[1, 3]], torch.zeros(2, 2, 16))
    assert bool(out[[0, 2]].all())
    rows = proven("paged_prefill", normal(6, 2, 16), *caches, int32(0, 1, 3, 3, 4), *table)
    assert torch.equal(rows[1:3], torch.zeros(2, 2, 16))  # of the sequence without tokens
    assert torch.equal(rows[3:], torch.zeros(3, 2, 16))  # of another one, and of none


def test_row_T6_latents_of_no_tokens_are_zero() -> None:
    """Five tokens and none, with NaN in every other slot."""
    caches = [torch.full((3, 8, width), math.nan) for width in (32, 8)]
    for cache in caches:
        cache[2, :5] = normal(5, cache.shape[2])
    q = normal(2, 4, 32), normal(2, 4, 8)
    out = proven("mla_decode", *q, *caches, int32(0, 1, 1), int32(2), int32(5, 8), 0.25)
    assert torch.equal(out[1], torch.zeros(4, 32))
    assert bool(out[0].isfinite().all())


def test_row_T31_large_pages_are_small_ones() -> None:
    tokens = normal(512, 2, 32, seed=1), normal(512, 2, 32, seed=2)
    q, found = normal(1, 4, 32), []
    for size in (16, 256):
        caches = [part.view(-1, size, 2, 32) for part in tokens]
        pages = 512 // size
        table = int32(0, pages), int32(*range(pages)), int32(size - 3)
        found.append(proven("paged_decode", q, *caches, *table))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("op", ["paged_decode", "paged_prefill"])
def test_row_T34_a_page_beyond_16_bits(op: str) -> None:
    """Values that are the number of their page, in eighths: page 67000 isn't page 1464."""
    values = (torch.arange(70_000) / 8).view(-1, 1, 1, 1).expand(-1, 2, 1, 8)
    keys, q = torch.zeros(70_000, 2, 1, 8), torch.zeros(1, 1, 8)
    rows = (int32(0, 1),) if op == "paged_prefill" else ()
    out = call(op, q, keys, values, *rows, int32(0, 1), int32(67_000), int32(2))
    assert torch.equal(out, torch.full((1, 1, 8), 67_000 / 8))


@pytest.mark.parametrize("op", ["paged_decode", "paged_prefill"])
def test_row_T35_a_page_beyond_2_31_elements(op: str) -> None:
    """Memory that is reserved, of which the first and the last page alone are touched."""
    pages, shape = BEYOND // (16 * 8 * 128) + 3, (16, 8, 128)
    cache = torch.empty(pages, *shape, dtype=HALF)
    assert cache.numel() > BEYOND
    cache[-1], cache[0] = 0.75, 3.0
    q, rows = normal(1, 8, 128, dtype=HALF), (int32(0, 1),) if op == "paged_prefill" else ()
    out = call(op, q, cache, cache, *rows, int32(0, 1), int32(pages - 1), int32(16))
    assert torch.equal(out, torch.full((1, 8, 128), 0.75, dtype=HALF))
    token = torch.full((2, 8, 128), 2.5, dtype=HALF)
    other = torch.empty_like(cache)
    other[-1] = 1.0
    slots = torch.tensor([pages * 16 - 1, -1])
    call("append_paged_kv_", token, token.clone(), cache, other, slots)
    for written, kept in ((cache, 0.75), (other, 1.0)):
        assert torch.equal(written[-1, -1], token[0])
        assert bool((written[-1, :-1] == kept).all())
    assert bool((cache[0] == 3.0).all())


def test_row_T41_a_longest_length_that_is_too_large() -> None:
    args = packed([3, 5], [4, 9])
    out, lse = proven("varlen_attention_with_lse", *args, True)
    for most in (6, 1000):
        again = call("varlen_attention_with_lse", *args[:-2], most, most + 4, True)
        torch.testing.assert_close(again, (out, lse))


def test_row_T42_a_neighbour_of_another_length() -> None:
    q, k, v = (normal(11, 2, 16, seed=i) for i in range(3))
    found = []
    for end in (10, 11):
        sequences = int32(0, 1, end)
        found.append(proven("varlen_attention", q, k, v, sequences, sequences, end, end, True)[0])
    torch.testing.assert_close(*found)


def test_row_K1_a_cache_in_a_packed_buffer() -> None:
    buffer = torch.full((6, 2, 4, 3, 8), 9.0)
    k, v = normal(5, 3, 8), normal(5, 3, 8, seed=1)
    slots = torch.tensor([23, 0, 7, 12, 2])
    call("append_paged_kv_", k, v, buffer[:, 0], buffer[:, 1], slots)
    for part, rows in ((buffer[:, 0], k), (buffer[:, 1], v)):
        assert torch.equal(part[slots // 4, slots % 4], rows)
    assert int((buffer == 9.0).sum()) == buffer.numel() - 2 * k.numel()


def test_row_K2_padding_is_skipped_and_fewer_slots_are_refused() -> None:
    k, cache = normal(8, 2, 4), torch.zeros(2, 4, 2, 4)
    caches = cache.clone(), cache.clone()
    call("append_paged_kv_", k, k, *caches, torch.tensor([4, 0, 1, 2, 3, -1, -1, -1]))
    assert torch.equal(caches[0].flatten(0, 1)[:5], k[[1, 2, 3, 4, 0]])
    assert not bool(caches[0].flatten(0, 1)[5:].any())
    with pytest.raises(ValueError, match=r"'slot_mapping' is of shape \[5\].*\[8\], \[T\]"):
        call("append_paged_kv_", k, k, *caches, torch.arange(5))


def test_row_K3_a_slot_behind_the_cache() -> None:
    k, caches = normal(2, 2, 4), [torch.zeros(3, 4, 2, 4) for _ in range(2)]
    message = r"argument 'slot_mapping' is as high as 12 \(accepted: at most 11, the last slot of"
    with torch_ops.debug(), pytest.raises(ValueError, match=message):
        call("append_paged_kv_", k, k, *caches, torch.tensor([-1, 12]))
    assert not any(bool(cache.any()) for cache in caches)


def test_latents_outside_of_the_cache_are_refused() -> None:
    args = normal(1, 2, 8), normal(1, 2, 4), normal(3, 4, 8), normal(3, 4, 4)
    message = r"'kv_indices' is in the range 3 to 3 \(accepted: 0 to 2, the pages of 'ckv_cache'"
    with torch_ops.debug(), pytest.raises(ValueError, match=message):
        call("mla_decode", *args, int32(0, 1), int32(3), int32(2), 0.5)


def _table(**changes: Tensor) -> list[Any]:
    """A decode of two sequences of two pages and of one, with some of the table changed."""
    table = {"kv_indptr": int32(0, 2, 3), "kv_indices": int32(4, 0, 2)}
    table |= {"kv_last_page_len": int32(1, 4)} | changes
    caches = normal(5, 4, 2, 16), normal(5, 4, 2, 16, seed=1)
    return [normal(2, 2, 16), *caches, *table.values()]


@pytest.mark.parametrize("op", ["paged_decode", "paged_prefill"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"kv_last_page_len": int32(1, 5)}, "'kv_last_page_len' is in the range 1 to 5 "
                     r"\(accepted: 1 to 4, the page_size", id="K5"),
        pytest.param({"kv_last_page_len": int32(0, 4)}, "'kv_last_page_len' is in the range 0 to 4 "
                     r"\(accepted: 1 to 4, the page_size, where a sequence has pages", id="K6"),
        pytest.param({"kv_indices": int32(4, 0, 5)}, r"'kv_indices' is in the range 0 to 5 "
                     r"\(accepted: 0 to 4, the pages of 'k_cache'", id="page_high"),
        pytest.param({"kv_indices": int32(-1, 0, 2)}, "'kv_indices' is in the range -1 to 2",
                     id="page_low"),
        pytest.param({"kv_indptr": int32(0, 3, 2)}, r"'kv_indptr' is \[0, 3, 2\] "
                     r"\(accepted: numbers that never fall, from 0 to at most 3", id="falls"),
        pytest.param({"kv_indptr": int32(1, 2, 3)}, r"'kv_indptr' is \[1, 2, 3\]", id="begins"),
        pytest.param({"kv_indptr": int32(0, 2, 4)}, r"'kv_indptr' is \[0, 2, 4\] .*the entries of",
                     id="ends"),
    ],
)  # fmt: skip
def test_row_a_table_that_points_outside_is_refused(
    op: str, change: dict[str, Tensor], message: str
) -> None:
    args = _table(**change)
    if op == "paged_prefill":
        args.insert(3, int32(0, 1, 2))
    with torch_ops.debug(), pytest.raises(ValueError, match=f"op '{op}': argument {message}"):
        call(op, *args)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (3, int32(0, 4, 3), r"'qo_indptr' is \[0, 4, 3\] \(accepted: numbers that never fall"),
        (3, int32(0, 3, 9), r"'qo_indptr' is \[0, 3, 9\] .*from 0 to at most 8, the rows of 'q'"),
        (4, int32(0, 4, 14), r"'kv_indptr' is \[0, 4, 14\] .*at most 13, the rows of 'k'"),
        (5, 4, r"'max_qo_len' is 4 \(accepted: a number >= 5, the longest sequence of 'qo_indptr'"),
        (6, 8, r"'max_kv_len' is 8 \(accepted: a number >= 9, the longest sequence of 'kv_indptr'"),
    ],
)
@pytest.mark.parametrize("op", ["varlen_attention", "varlen_attention_with_lse"])
def test_bounds_that_are_wrong_are_refused(op: str, place: int, value: Any, message: str) -> None:
    args = packed([3, 5], [4, 9])
    args[place] = value
    with torch_ops.debug(), pytest.raises(ValueError, match=f"op '{op}': argument {message}"):
        call(op, *args)


def test_rows_behind_the_last_sequence_are_zeros() -> None:
    args = packed([3, 2], [4, 2])
    args[0] = torch.cat([args[0], torch.full((3, 2, 16), math.nan)])
    out, lse = proven("varlen_attention_with_lse", *args)
    assert torch.equal(out[5:], torch.zeros(3, 2, 16))
    assert bool((lse[5:] == -INF).all())
    assert bool(out[:5].isfinite().all())
