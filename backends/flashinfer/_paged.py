"""Paged calls of layers by FlashInfer's FA2: planned on the host, run inside of graphs.

Decode steps run the prefill kernels, too: tensor cores read a cache faster than its decode kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import limits
from torch_ops.attention.metadata import AttentionMetadata
from torch_ops.attention.prepared import AttentionSpec
from torch_ops.errors import BackendUnavailableError

from . import _modules, _ragged, _sequences

__all__ = ["Plan"]


class Plan:
    """What FlashInfer keeps for one metadata: of one spec, for all layers that are alike.

    Its buffers are the metadata's and its own: they stay where they are, as graphs need it.
    """

    def __init__(
        self, spec: AttentionSpec, dtype: torch.dtype, metadata: AttentionMetadata
    ) -> None:
        self._spec, self._dtype = spec, dtype
        tables = metadata.tables
        assert tables.kv_indices is not None
        assert tables.kv_last_page_len is not None
        workspace = torch.zeros(_sequences.ROOM, dtype=torch.uint8, device=tables.qo_indptr.device)
        _ragged.load("fa2", dtype, spec.head_dim, spec.window_left >= 0)  # of the same module
        self._wrapper = _modules.package("prefill").BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=torch.zeros_like(tables.qo_indptr),
            paged_kv_indptr_buf=torch.zeros_like(tables.kv_indptr),
            paged_kv_indices_buf=torch.zeros_like(tables.kv_indices),
            paged_kv_last_page_len_buf=torch.zeros_like(tables.kv_last_page_len),
            backend="fa2",
        )
        self._decoded: Tensor | None = None  # where queries begin, in a step that decodes
        if tables.decodes:  # a row for each sequence; FlashInfer else takes those planned first
            rows = tables.kv_last_page_len.shape[0]
            self._wrapper._max_total_num_rows = rows
            self._decoded = torch.arange(rows + 1, dtype=torch.int32, device="cpu")
        self._copied: torch.cuda.Event | None = None

    def update(self, metadata: AttentionMetadata) -> None:
        """Plan the metadata's numbers.

        A step that decodes has a query for each sequence, of padding, too: one of no keys gets
        zeros. Else FlashInfer would leave rows behind the last sequence as they are.

        Raises:
            BackendUnavailableError: queries of a prompt have no key, or causal ones fewer than
                there are.
        """
        spec, host, starts = self._spec, metadata.host, self._decoded
        if starts is None:
            starts = host.qo_indptr
            for queries, keys in zip(metadata.query_lens, metadata.kv_lens, strict=True):
                if queries > (keys if spec.is_causal or not keys else queries):
                    _refuse(f"{queries} queries of {keys} keys (supported: at most as many)")
        if self._copied is not None:  # FlashInfer writes to where the last plan is copied from
            self._copied.synchronize()
        self._wrapper.plan(
            starts,
            host.kv_indptr,
            metadata.tables.kv_indices[: int(host.kv_indptr[-1])],  # type: ignore[index]
            host.kv_last_page_len,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            metadata.page_size,
            causal=spec.is_causal,
            window_left=spec.window_left,
            sm_scale=spec.scale,
            q_data_type=self._dtype,
        )
        if metadata.tables.qo_indptr.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend.

        Raises:
            BackendUnavailableError: the caches lie in memory as FlashInfer can't read them.
        """
        if k.stride() != v.stride():
            _refuse(limits.strides("v", v, f"those of k, {k.stride()}"))
        for name, cache in (("k", k), ("v", v)):
            reason = _sequences.layout(name, cache)
            if reason is not None:
                _refuse(reason)
        if q.stride()[1:] != (q.shape[2], 1) or q.data_ptr() & 15:
            q = q.clone(memory_format=torch.contiguous_format)
        out = torch.empty_like(q)
        if self._decoded is None:
            out.zero_()  # FlashInfer writes no rows behind the last sequence
        self._wrapper.run(q, (k, v), out=out)
        return out


def _refuse(reason: str) -> None:
    raise BackendUnavailableError(
        f"Attention backend 'flashinfer_fa2' can't serve a paged call: {reason}",
        op="attention",
        backend="flashinfer_fa2",
        reasons=(reason,),
    )
