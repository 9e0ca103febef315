"""What attention over a paged cache shares: gathering pages, and the checks.

Sequence b has the pages ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``; all are full but the last,
which holds ``kv_last_page_len[b]`` tokens. A sequence without pages has no tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import checks
from torch_ops.declarations import _attention, _ragged

__all__ = ["check", "check_pages", "check_sizes", "check_table", "gather", "kv_lengths"]


def kv_lengths(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """Give how many tokens each sequence has, ``[B]`` int64."""
    pages = _ragged.lengths(kv_indptr)
    tokens = (pages - 1) * page_size + kv_last_page_len.long()
    return tokens.masked_fill(pages == 0, 0)


def gather(
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each sequence's tokens side by side, as many for each as `_ragged.longest` allows.

    Where that can't read the table, as on a GPU, each sequence takes the room of all of them.

    Returns:
        Keys and values ``[B, S_kv, ...]``, zeros behind a sequence's end, and the lengths.
    """
    page_size = k_cache.shape[1]
    tokens = kv_lengths(kv_indptr, kv_last_page_len, page_size)
    rows, listed = _ragged.rows_of(kv_indptr, _ragged.longest(kv_indptr, kv_indices.shape[0]))
    pages = _ragged.take(kv_indices, rows, listed).long()
    key = torch.arange(pages.shape[1] * page_size, device=pages.device)
    held = (key < tokens.unsqueeze(1)).view(*pages.shape, page_size)
    k, v = (_ragged.take(cache, pages, held).flatten(1, 2) for cache in (k_cache, v_cache))
    return k, v, tokens


def check(
    op: str,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: int,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    scale: float | None,
    window_left: int,
    logits_soft_cap: float,
) -> None:
    """Refuse tensors that don't fit together and numbers out of range."""
    check_pages(op, k_cache, v_cache, q.shape[2], "D of 'q'")
    _attention.check_heads(op, "k_cache", q.shape[1], k_cache.shape[2])
    checks.like(op, "k_cache", k_cache, q, "q")
    checks.like(op, "v_cache", v_cache, q, "q")
    check_sizes(op, q, "q", batch, kv_indptr, kv_indices, kv_last_page_len)
    _attention.check_numbers(op, q.shape[2], scale, window_left, logits_soft_cap)


def check_sizes(
    op: str,
    q: Tensor,
    name: str,
    batch: int,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Refuse what is no page table of so many sequences on the device of ``q``, called ``name``."""
    _ragged.check_index(op, "kv_indptr", kv_indptr, q, name)
    if kv_indptr.shape[0] != batch + 1:
        received = f"of shape {list(kv_indptr.shape)}"
        checks.refuse(op, "kv_indptr", received, f"[{batch + 1}], a bound more than sequences")
    _ragged.check_index(op, "kv_indices", kv_indices, q, name)
    _ragged.check_index(op, "kv_last_page_len", kv_last_page_len, q, name)
    if kv_last_page_len.shape[0] != batch:
        checks.shape(op, "kv_last_page_len", kv_last_page_len, [batch], "one a sequence")


def check_pages(op: str, k_cache: Tensor, v_cache: Tensor, head_dim: int, letters: str) -> None:
    """Refuse caches that aren't pages of heads of ``head_dim`` elements."""
    if k_cache.dim() != 4 or k_cache.shape[3] != head_dim or k_cache.shape[1] == 0:
        wanted = f"[P, page_size >= 1, K, {head_dim}], {letters}"
        checks.refuse(op, "k_cache", f"of shape {list(k_cache.shape)}", wanted)
    if v_cache.dim() != 4 or v_cache.shape[:3] != k_cache.shape[:3]:
        wanted = f"{[*k_cache.shape[:3], 'D']}, P, page_size and K of 'k_cache'"
        checks.refuse(op, "v_cache", f"of shape {list(v_cache.shape)}", wanted)


def check_table(
    op: str,
    cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    name: str = "k_cache",
) -> None:
    """Refuse a page table that points outside of the cache, called ``name``; reads the data."""
    entries, page_size = kv_indices.shape[0], cache.shape[1]
    _ragged.check_indptr(op, "kv_indptr", kv_indptr, entries, "the entries of 'kv_indices'")
    used = kv_indices[: int(kv_indptr[-1])]
    low, high = (int(used.min()), int(used.max())) if used.numel() else (0, 0)
    if used.numel() and (low < 0 or high >= cache.shape[0]):
        accepted = f"0 to {cache.shape[0] - 1}, the pages of {name!r}"
        checks.refuse(op, "kv_indices", f"in the range {low} to {high}", accepted)
    last = kv_last_page_len[_ragged.lengths(kv_indptr) > 0]
    low, high = (int(last.min()), int(last.max())) if last.numel() else (1, 1)
    if low < 1 or high > page_size:
        accepted = f"1 to {page_size}, the page_size, where a sequence has pages"
        checks.refuse(op, "kv_last_page_len", f"in the range {low} to {high}", accepted)
