"""mla_decode: attention of one query of each sequence to a paged cache of latents."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import checks
from torch_ops.contracts import RaggedAttentionContract
from torch_ops.declarations import _attention, _paged
from torch_ops.declare import op


@op(contract=RaggedAttentionContract())
def mla_decode(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    scale: float,
) -> Tensor:
    """Attend one query of each sequence to its latents, which are keys and values, in pages.

    All heads share one key, a latent and a rotated part, and the latent is its value. With
    ``c_b``, ``r_b`` the tokens of sequence b in the order of its pages::

        out[b, h] = softmax(scale * (c_b @ q_nope[b, h] + r_b @ q_pe[b, h])) @ c_b

    The projections from latents to heads are absorbed: that of keys into ``q_nope``, that of values
    into what follows.

    Args:
        q_nope: ``[B, H, L]`` float16, bfloat16, float32 or float64, any strides: queries of
            latents, each of which stands at its sequence's last key.
        q_pe: ``[B, H, R]``, dtype and device of ``q_nope``: queries of rotated parts.
        ckv_cache: ``[P, page_size, L]``, dtype and device of ``q_nope``, any strides: latents.
        kpe_cache: ``[P, page_size, R]``, dtype and device of ``q_nope``: rotated parts. Both may be
            views of one cache ``[P, page_size, L + R]``.
        kv_indptr: ``[B + 1]`` int32 from 0, never falling: sequence b has the pages
            ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``.
        kv_indices: int32 pages, each in ``[0, P)``; what is behind ``kv_indptr[B]`` isn't read.
        kv_last_page_len: ``[B]`` int32, tokens in each sequence's last page, 1 to page_size. Not
            read for a sequence without pages, which has no tokens.
        scale: Multiplier of the logits. No default: it is that of heads before the absorption,
            ``(128 + 64) ** -0.5`` and a factor of longer contexts in DeepSeek-V3, not of L + R.

    Returns:
        ``[B, H, L]``, dtype of ``q_nope``, contiguous; zeros for a sequence without tokens. Logits,
        softmax and sums are float32 (float64 for float64 input).

    Pages that no sequence lists and slots behind the last token are never read. What the table
    holds is a precondition, checked in ``torch_ops.debug()`` alone.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, or the scale isn't finite.
        NoBackwardError: an input requires grad.

    Source: DeepSeek-AI, DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """
    latents, rotated, tokens = _paged.gather(
        ckv_cache, kpe_cache, kv_indptr, kv_indices, kv_last_page_len
    )
    q = torch.cat([q_nope, q_pe], -1).unsqueeze(1)
    k = torch.cat([latents, rotated], -1).unsqueeze(2)
    key = torch.arange(k.shape[1], device=k.device)
    seen = (key < tokens.unsqueeze(1))[:, None, None, None]
    return _attention.attend(q, k, latents.unsqueeze(2), seen, scale, 0.0)[0].squeeze(1)


@mla_decode.check
def _check(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    scale: float,
) -> None:
    name = "mla_decode"
    checks.float_dtype(name, "q_nope", q_nope)
    checks.rank(name, "q_nope", q_nope, 3, "[B, H, L]")
    batch, heads, latent = q_nope.shape
    if q_pe.dim() != 3 or q_pe.shape[:2] != q_nope.shape[:2]:
        wanted = f"[{batch}, {heads}, R], B and H of 'q_nope'"
        checks.refuse(name, "q_pe", f"of shape {list(q_pe.shape)}", wanted)
    if ckv_cache.dim() != 3 or ckv_cache.shape[2] != latent or ckv_cache.shape[1] == 0:
        wanted = f"[P, page_size >= 1, {latent}], L of 'q_nope'"
        checks.refuse(name, "ckv_cache", f"of shape {list(ckv_cache.shape)}", wanted)
    rotated = [*ckv_cache.shape[:2], q_pe.shape[2]]
    letters = "P and page_size of 'ckv_cache', R of 'q_pe'"
    checks.shape(name, "kpe_cache", kpe_cache, torch.Size(rotated), letters)
    for argument, x in (("q_pe", q_pe), ("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache)):
        checks.like(name, argument, x, q_nope, "q_nope")
    table = kv_indptr, kv_indices, kv_last_page_len
    _paged.check_sizes(name, q_nope, "q_nope", batch, *table)
    _attention.check_scale(name, scale, "a finite number")


@mla_decode.debug_check
def _debug_check(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    scale: float,
) -> None:
    table = kv_indptr, kv_indices, kv_last_page_len
    _paged.check_table("mla_decode", ckv_cache, *table, name="ckv_cache")


@mla_decode.fake
def _fake(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    scale: float,
) -> Tensor:
    return q_nope.new_empty(q_nope.shape)
