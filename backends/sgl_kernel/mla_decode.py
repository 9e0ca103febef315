"""FlashMLA's dense decode as sgl-kernel has it, of one cache of latents and rotated parts.

sgl-kernel's cutlass_mla_decode, for SM100 alone, isn't wrapped: it multiplies whole pages by
weights, so that NaN behind a sequence's end spreads, and writes nothing for a sequence of no keys.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from torch_ops import limits
from torch_ops.declarations import _paged, _ragged

from . import _library

__all__ = ["mla_decode", "supports"]

_LATENT, _ROTATED, _PAGE = 512, 64, 64
_ENTRIES = 2**26  # of the page table, which has a row of all listed pages for each sequence


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
    if not (q_nope.numel() and ckv_cache.numel() and kv_indices.numel()):
        return q_nope.new_zeros(q_nope.shape)
    lengths = _paged.kv_lengths(kv_indptr, kv_last_page_len, _PAGE)
    places = _ragged.rows_of(kv_indptr, kv_indices.shape[0])
    pages = _ragged.take(kv_indices, *places)
    page, row, _ = ckv_cache.stride()
    shape = (ckv_cache.shape[0], _PAGE, 1, _LATENT + _ROTATED)
    cache = ckv_cache.as_strided(shape, (page, row, row, 1))
    q = torch.cat([q_nope, q_pe], -1).unsqueeze(1)
    run, index = _library.operator("dense_decode_fwd", "flashmla_ops"), q.get_device()
    given = (q, cache, _LATENT, lengths.int(), pages, scale, False, None, None)
    if index < 0 or index == torch.cuda.current_device():
        out: Tensor = run(*given)[0]
    else:
        with torch.cuda.device(index):
            out = run(*given)[0]
    return out.squeeze(1).masked_fill_((lengths == 0).view(-1, 1, 1), 0)


def supports(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    scale: float,
) -> str | None:
    if q_nope.dtype not in limits.HALVES:
        return limits.unsupported("q_nope", q_nope, limits.HALVES)
    parts = q_nope.shape[2], q_pe.shape[2]
    if parts != (_LATENT, _ROTATED):
        found = f"latents of {parts[0]} and rotated parts of {parts[1]} elements"
        return f"{found} (supported: {_LATENT} and {_ROTATED})"
    if ckv_cache.shape[1] != _PAGE:
        return f"pages of {ckv_cache.shape[1]} tokens (supported: {_PAGE})"
    if not scale > 0:
        return f"scale {scale} (supported: above 0; maxima are those of unscaled logits)"
    if q_nope.shape[0] * kv_indices.shape[0] > _ENTRIES:
        table = f"{kv_indices.shape[0]} listed pages of {q_nope.shape[0]} sequences"
        return f"{table} (supported: a product of at most {_ENTRIES})"
    return _apart(ckv_cache, kpe_cache) or _without_instructions(q_nope.get_device())


def _apart(ckv: Tensor, kpe: Tensor) -> str | None:
    """Give why two caches aren't one that can be read where it lies."""
    if not ckv.numel():
        return None
    page, row, last = ckv.stride()
    behind = ckv.data_ptr() + _LATENT * ckv.element_size()
    if (
        kpe.stride() != ckv.stride()
        or kpe.data_ptr() != behind
        or kpe.untyped_storage().data_ptr() != ckv.untyped_storage().data_ptr()
    ):
        return (
            "caches that are apart (supported: views of one, [P, 64, 576], latents before rotated "
            "parts)"
        )
    if last != 1 or (page | row) & 7 or not (page and row):
        text = "1 for the last axis, multiples of 8 for the others"
        return limits.strides("ckv_cache", ckv, text)
    return limits.misaligned("ckv_cache", ckv, "16") if ckv.data_ptr() & 15 else None


@functools.cache
def _without_instructions(device: int) -> str | None:
    if device >= 0 and (found := torch.cuda.get_device_capability(device)) != (9, 0):
        return f"compute capability {found[0]}.{found[1]} (supported: 9.0)"
    return None
