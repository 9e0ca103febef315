"""FlashInfer's multi-head latent attention, FA2 or FA3; it waits for the GPU.

What the parts of a split sequence give is rounded to the dtype of queries before it is merged.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from torch_ops import limits
from torch_ops.once import once

from . import _modules, _prefill
from ._sequences import LOCK, Lengths, Table, layout, offsets, read, refuse_capture, wrapper

__all__ = ["mla_decode", "supports"]

_LATENT, _ROTATED = 512, 64  # its tiles of shared memory are for these
_HEADS = 64  # of a tile
_TILES = 16_000  # a plan has room for 16384, of which splits take one a multiprocessor


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
    out = q_nope.new_zeros(q_nope.shape)
    if not (out.numel() and ckv_cache.numel() and kv_indices.numel()):
        return out
    refuse_capture("mla_decode", "take")
    lengths = read(Table(None, kv_indptr, kv_indices, kv_last_page_len), ckv_cache.shape[1])
    rows = [b for b, keys in enumerate(lengths.keys) if keys]
    if not rows:
        return out
    caches = ckv_cache, kpe_cache
    if len(rows) == len(lengths.keys):
        return _run(out, (q_nope, q_pe), caches, kv_indices, lengths, rows, scale)
    chosen = torch.tensor(rows, device=out.device)
    queries = q_nope[chosen], q_pe[chosen]
    out[chosen] = _run(out[chosen], queries, caches, kv_indices, lengths, rows, scale)
    return out


def _run(
    out: Tensor,
    queries: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    lengths: Lengths,
    rows: list[int],
    scale: float,
) -> Tensor:
    """Plan and run the sequences that have keys; queries and ``out`` are theirs."""
    family, dtype = _prefill.family(out.device), out.dtype
    load(family, dtype)
    starts = [*(lengths.starts[b] for b in rows), lengths.starts[-1]]
    keys = [lengths.keys[b] for b in rows]
    tables = (torch.tensor(numbers, dtype=torch.int32) for numbers in (starts, keys))
    indptr, kv_len = tables
    sizes = (out.shape[1], _LATENT, _ROTATED, caches[0].shape[1])
    with LOCK:
        planned = wrapper("BatchMLAPagedAttentionWrapper", family, out.device)
        planned.plan(
            offsets([1] * len(rows)), indptr, kv_indices.contiguous(), kv_len, *sizes, False, scale,
            dtype, dtype,
        )  # fmt: skip
        planned.run(*queries, *caches, out=out)
    return out


@functools.cache
def load(family: str, dtype: torch.dtype) -> Any:
    """Give the compiled module, as the wrapper will ask for it."""
    kind = (dtype, dtype, dtype, torch.int32, _LATENT, _ROTATED, False)
    return once(
        ("flashinfer", "mla", family, dtype),
        f"FlashInfer's latent attention {family} for {dtype}",
        lambda: _modules.package("mla").get_batch_mla_module(family, *kind),
    )


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
    batch, heads, latent = q_nope.shape
    if (latent, q_pe.shape[2]) != (_LATENT, _ROTATED):
        parts = f"latents of {latent} and rotated parts of {q_pe.shape[2]} elements"
        return f"{parts} (supported: {_LATENT} and {_ROTATED})"
    if not scale > 0:
        return f"scale {scale} (supported: above 0; maxima are those of unscaled logits)"
    if batch * -(-heads // _HEADS) > _TILES:
        tiles = f"{batch} sequences of {heads} heads"
        return f"{tiles} (supported: {_TILES} tiles of {_HEADS} heads)"
    if not (q_nope.numel() and ckv_cache.numel()):
        return None
    tensors = (("q_nope", q_nope), ("q_pe", q_pe), ("ckv_cache", ckv_cache))
    for name, x in (*tensors, ("kpe_cache", kpe_cache)):
        reason = layout(name, x, pages=name.endswith("_cache"))
        if reason is not None:
            return reason
    return None
