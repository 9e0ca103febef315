"""mla_decode in Triton."""

from __future__ import annotations

from torch import Tensor

from ._mla_decode import forward, unfit

__all__ = ["mla_decode", "supports"]


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
    return forward(
        q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, kv_last_page_len, scale
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
    return unfit(q_nope.dtype, q_nope.shape[-1], q_pe.shape[-1], scale)
