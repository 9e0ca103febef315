"""A model of FlashInfer 0.6.13 on the CPU: what its functions take and what they return.

Each refuses what the real one refuses, and raises where the real one would read beside a tensor.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from . import math64

HALVES = (torch.float16, torch.bfloat16)
HANDLE = 0x5EED  # of cuBLAS, on a machine without a GPU


class Model:
    """The package.

    Attributes:
        built: Names of the modules that were compiled, in order.
        called: Names of the functions that ran, with what they got besides tensors.
        broken: What compiling a module raises, by its name.
    """

    def __init__(self) -> None:
        self.built: list[str] = []
        self.called: list[tuple[Any, ...]] = []
        self.broken: dict[str, Exception] = {}

    def compiled(self, name: str, **functions: Callable[..., Any]) -> SimpleNamespace:
        self.built.append(name)
        if name in self.broken:
            raise self.broken[name]
        return SimpleNamespace(**functions)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the package where imports find it."""
        package = ModuleType("flashinfer")
        package.__path__ = []
        contents: dict[str, dict[str, Any]] = {
            "norm": {"get_norm_module": self._norm_module},
            "activation": {"get_act_and_mul_module": self._activation_module},
            "rope": {"get_rope_module": self._rope_module},
            "cascade": {"get_cascade_module": self._cascade_module},
            "jit.gemm": {
                "gen_gemm_module": lambda: SimpleNamespace(build_and_load=self._gemm_module)
            },
            "prefill": {
                "get_single_prefill_module": self._single_module,
                "get_batch_prefill_module": self._batch_module,
                "single_prefill_with_kv_cache": self._single,
                "BatchPrefillWithRaggedKVCacheWrapper": self._wrapper,
                "BatchPrefillWithPagedKVCacheWrapper": self._paged_wrapper,
            },
            "mla": {
                "get_batch_mla_module": self._mla_module,
                "BatchMLAPagedAttentionWrapper": self._mla_wrapper,
            },
        }
        monkeypatch.setitem(sys.modules, "flashinfer", package)
        for name, functions in contents.items():
            module = ModuleType(f"flashinfer.{name}")
            vars(module).update(functions)
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def _norm_module(self) -> SimpleNamespace:
        def rmsnorm(out: Tensor, x: Tensor, weight: Tensor, eps: float, pdl: bool) -> None:
            self._rows(x, out, weight)
            self.called.append(("rmsnorm", eps, pdl))
            out.copy_(math64.rms(x, weight.double(), eps))

        def gemma_rmsnorm(out: Tensor, x: Tensor, weight: Tensor, eps: float, pdl: bool) -> None:
            self._rows(x, out, weight)
            self.called.append(("gemma_rmsnorm", eps, pdl))
            out.copy_(math64.rms(x, 1 + weight.double(), eps))

        def fused(x: Tensor, residual: Tensor, weight: Tensor, eps: float, pdl: bool) -> None:
            self._fused("fused_add_rmsnorm", x, residual, weight, eps, pdl)

        def gemma(x: Tensor, residual: Tensor, weight: Tensor, eps: float, pdl: bool) -> None:
            self._fused("gemma_fused_add_rmsnorm", x, residual, weight, eps, pdl, plus=1.0)

        def layernorm(out: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> None:
            assert x.dtype is torch.bfloat16
            assert gamma.dtype is beta.dtype is torch.float32
            assert all(t.is_contiguous() for t in (out, x, gamma, beta))
            self.called.append(("layernorm", eps))
            wide = x.double()
            apart = wide - wide.mean(-1, keepdim=True)
            out.copy_(apart * torch.rsqrt(apart.square().mean(-1, keepdim=True) + eps)
                      * gamma.double() + beta.double())  # fmt: skip

        return self.compiled(
            "norm", rmsnorm=rmsnorm, gemma_rmsnorm=gemma_rmsnorm, fused_add_rmsnorm=fused,
            gemma_fused_add_rmsnorm=gemma, layernorm=layernorm,
        )  # fmt: skip

    def _fused(
        self, name: str, x: Tensor, residual: Tensor, weight: Tensor, eps: float, pdl: bool,
        plus: float = 0.0,
    ) -> None:  # fmt: skip
        self._rows(x, residual, weight)
        self.called.append((name, eps, pdl))
        total = x.double() + residual.double()
        residual.copy_(total)
        x.copy_(math64.rms(total, plus + weight.double(), eps))

    @staticmethod
    def _rows(x: Tensor, other: Tensor, weight: Tensor) -> None:
        assert x.dtype in HALVES
        assert x.dtype is other.dtype is weight.dtype
        assert x.dim() == other.dim() == 2
        assert x.shape == other.shape
        vector = math.gcd(16, x.shape[1] * x.element_size())
        for rows in (x, other):
            assert rows.stride(1) == 1
            assert rows.data_ptr() % vector == 0
            assert rows.shape[0] == 1 or rows.stride(0) * x.element_size() % vector == 0
        assert weight.is_contiguous()
        assert weight.data_ptr() % vector == 0

    def _activation_module(self, name: str) -> SimpleNamespace:
        def act(out: Tensor, x: Tensor, pdl: bool) -> None:
            assert x.dtype in HALVES
            assert x.is_contiguous()
            assert out.is_contiguous()
            assert x.shape[-1] % 16 == 0
            assert x.data_ptr() % 16 == 0
            self.called.append((f"{name}_and_mul", pdl))
            gate, value = x.chunk(2, -1)
            out.copy_(math64.activated(name, gate) * value.double())

        return self.compiled(f"{name}_and_mul", **{f"{name}_and_mul": act})

    def _rope_module(self) -> SimpleNamespace:
        def rope(
            q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, cache: Tensor, positions: Tensor,
            interleave: bool,
        ) -> None:  # fmt: skip
            assert cache.dtype is torch.float32
            assert cache.is_contiguous()
            assert positions.is_contiguous()
            assert positions.dtype in (torch.int32, torch.int64)
            for x in (q, k, q_out, k_out):
                assert x.dtype in HALVES
                assert x.dim() == 3
                assert x.stride(2) == 1
                assert (x.stride(0) | x.stride(1)) % 8 == 0
                assert x.data_ptr() % 16 == 0
            self.called.append(("rope", interleave))
            for x, out in ((q, q_out), (k, k_out)):
                out.copy_(math64.rotated(x, cache, positions, not interleave))

        return self.compiled("rope", apply_rope_pos_ids_cos_sin_cache=rope)

    def _cascade_module(self) -> SimpleNamespace:
        def merge(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, v: Tensor, s: Tensor) -> None:
            assert all(t.is_contiguous() for t in (v_a, s_a, v_b, s_b, v, s))
            self.called.append(("merge_state",))
            for out, result in zip((v, s), math64.merged(v_a, s_a, v_b, s_b, 2), strict=True):
                out.copy_(result)

        return self.compiled("cascade", merge_state=merge)

    def _gemm_module(self) -> SimpleNamespace:
        def bmm_fp8(
            a: Tensor, b: Tensor, out: Tensor, scale_a: Tensor, scale_b: Tensor, workspace: Tensor,
            handle: int,
        ) -> None:  # fmt: skip
            (one, m, k), n = a.shape, b.shape[2]
            assert one == 1
            assert a.dtype is b.dtype is torch.float8_e4m3fn
            assert out.dtype is torch.bfloat16
            assert tuple(b.shape) == (1, k, n)
            assert tuple(out.shape) == (1, m, n)
            assert a.stride()[1:] == (k, 1)
            assert b.stride()[1:] == (1, k)
            assert out.is_contiguous()
            assert k % 16 == n % 16 == 0
            assert m * n * k
            for x in (a, b, out):
                assert x.data_ptr() % 16 == 0
            for scale in (scale_a, scale_b):
                assert scale.dtype is torch.float32
                assert scale.numel() == 1
            assert workspace.dtype is torch.uint8
            assert workspace.numel() == 32 << 20
            self.called.append(("bmm_fp8", handle))
            total = a[0].double() @ b[0].double()
            out[0] = total * scale_a.double().reshape(()) * scale_b.double().reshape(())

        return self.compiled("gemm", bmm_fp8=bmm_fp8)

    def _single_module(self, backend: str, *kind: Any) -> None:
        q, kv, out, head_dim, value_dim, encoding, windowed, capped, reduced = kind
        assert q is kv is out
        assert head_dim == value_dim
        assert not encoding
        assert not capped
        assert not reduced
        self.compiled(f"single {backend} {head_dim} {windowed}")

    def _batch_module(self, backend: str, *kind: Any) -> None:
        q, kv, out, index, head_dim, value_dim, encoding, windowed, capped, reduced = kind
        assert q is kv is out
        assert index is torch.int32
        assert head_dim == value_dim
        assert not encoding
        assert not capped
        assert not reduced
        self.compiled(f"batch {backend} {head_dim} {windowed}")

    def _single(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, window_left: int,
        backend: str, return_lse: bool,
    ) -> Any:  # fmt: skip
        self._operands(q, k, v, causal)
        self.called.append(("single", backend, causal, sm_scale, window_left, return_lse))
        out, lse = math64.attended(q, k, v, causal, sm_scale, window_left)
        out, lse = out.to(q.dtype).contiguous(), lse.float().contiguous()
        return (out, lse) if return_lse else out

    @staticmethod
    def _operands(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
        assert q.shape[0]
        assert k.shape[0]
        assert not (causal and q.shape[0] > k.shape[0])
        for x in (q, k, v):
            assert x.dtype in HALVES
            assert x.dim() == 3
            assert x.shape[2] in (64, 128, 256)
            assert x.stride(2) == 1
            assert x.data_ptr() % 16 == 0
            assert x.stride(0)
            assert x.stride(1)
            assert (x.stride(0) | x.stride(1)) % 8 == 0

    def _wrapper(self, workspace: Tensor, layout: str, *, backend: str) -> Wrapper:
        assert layout == "NHD"
        assert workspace.dtype is torch.uint8
        return Wrapper(self, backend, workspace.numel())

    def _paged_wrapper(
        self, workspace: Tensor, layout: str, *, backend: str, use_cuda_graph: bool = False,
        **buffers: Tensor,
    ) -> PagedWrapper:  # fmt: skip
        assert layout == "NHD"
        assert not workspace.any()
        assert use_cuda_graph == bool(buffers)
        return PagedWrapper(self, backend, workspace.numel(), buffers)

    def _mla_module(self, backend: str, *kind: Any) -> None:
        q, kv, out, index, *sizes = kind
        assert q is kv is out
        assert q in HALVES
        assert index is torch.int32
        assert sizes == [512, 64, False]
        self.compiled(f"mla {backend}")

    def _mla_wrapper(self, workspace: Tensor, *, backend: str) -> LatentWrapper:
        assert workspace.dtype is torch.uint8
        assert workspace.numel() >= 128 << 20
        return LatentWrapper(self, backend)


class LatentWrapper:
    """A planned batch of sequences of latents in pages."""

    def __init__(self, model: Model, backend: str) -> None:
        self.model, self.backend = model, backend

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor,
        num_heads: int, head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool,
        sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        for table in (qo_indptr, kv_indptr, kv_len_arr, kv_indices):
            assert table.dtype is torch.int32
            assert table.is_contiguous()
        count = len(kv_len_arr)
        assert qo_indptr.tolist() == [*range(count + 1)]
        assert len(kv_indptr) == count + 1
        assert (kv_len_arr > 0).all()
        assert not causal
        assert sm_scale > 0
        assert q_data_type is kv_data_type
        self.table = kv_indptr.tolist(), kv_indices.long(), kv_len_arr.tolist()
        self.sizes = num_heads, head_dim_ckv, head_dim_kpe, page_size
        self.scale, self.dtype = sm_scale, q_data_type
        self.model.called.append(("plan", self.backend, self.table[0], self.table[2], num_heads))

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, *, out: Tensor) -> None:
        starts, pages, lengths = self.table
        assert (*q_nope.shape[1:], q_pe.shape[2], ckv.shape[1]) == self.sizes
        assert out.shape == q_nope.shape
        assert len(q_nope) == len(lengths)
        for x in (q_nope, q_pe, ckv, kpe):
            assert x.dtype is self.dtype
            assert x.stride(2) == 1
            assert x.data_ptr() % 16 == 0
            assert all(step % 8 == 0 for n, step in zip(x.shape, x.stride()[:2], strict=False) if n)
        for row, (start, count) in enumerate(zip(starts, lengths, strict=False)):
            token = torch.arange(count)
            at = pages[start + token // ckv.shape[1]], token % ckv.shape[1]
            assert start + (count - 1) // ckv.shape[1] < starts[row + 1]
            q = torch.cat([q_nope[row], q_pe[row]], -1)[None]
            k = torch.cat([ckv[at], kpe[at]], -1)[:, None]
            found = math64.attended(q, k, ckv[at][:, None], False, self.scale, -1)
            out[row] = found[0][0].to(out.dtype)


class Wrapper:
    """A planned batch of ragged sequences."""

    def __init__(self, model: Model, backend: str, room_for_parts: int) -> None:
        self.model, self.backend, self.room_for_parts = model, backend, room_for_parts
        self.room = 8 << 20

    def reset_workspace_buffer(self, floats: Tensor, ints: Tensor) -> None:
        self.room = ints.numel()

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim_qk: int, **options: Any,
    ) -> None:  # fmt: skip
        for offsets in (qo_indptr, kv_indptr):
            assert offsets.dtype is torch.int32
            assert offsets.device.type == "cpu"
        assert options.pop("disable_split_kv", False) or self.room_for_parts >= 128 << 20
        assert options.pop("q_data_type") in HALVES
        assert options.pop("kv_data_type", torch.float16) in HALVES
        self.bounds = qo_indptr.tolist(), kv_indptr.tolist()
        self.heads = num_qo_heads, num_kv_heads, head_dim_qk
        self.options = options
        tiles = self.bounds[0][-1] * num_qo_heads / 64 + len(self.bounds[0])
        assert self.room >= 28 * tiles
        self.model.called.append(("plan", self.backend, *self.bounds, *self.heads))

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool) -> Any:
        assert (q.shape[1], k.shape[1], q.shape[2]) == self.heads
        for x in (q, k, v):  # those of axes of one element, too
            assert all(step and step % 8 == 0 for step in x.stride()[:2])
        starts = self.bounds[1]
        keys = [slice(*pair) for pair in itertools.pairwise(starts)]
        found = self._attend(q, [(k[rows], v[rows]) for rows in keys], return_lse)
        if self.backend == "fa3":
            self._reach_over(found[0] if return_lse else found, v)
        return found

    def _reach_over(self, out: Tensor, v: Tensor) -> None:
        """Add zero times the values behind each sequence's last one, to the end of the tile."""
        tile = 192 if self.heads[2] == 128 and not self.options["causal"] else 128
        for queries, (first, last) in zip(*map(itertools.pairwise, self.bounds), strict=True):
            behind = v[last : first + -(-(last - first) // tile) * tile]
            zero = (behind * 0).sum(0).repeat_interleave(self.heads[0] // self.heads[1], 0)
            out[slice(*queries)] += zero

    def _attend(self, q: Tensor, keys: list[tuple[Tensor, Tensor]], return_lse: bool) -> Any:
        causal, window = self.options["causal"], self.options["window_left"]
        self.model.called.append(("run", self.backend, causal, window, return_lse))
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        assert self.bounds[0][-1] == len(q)
        for (start, end), (k, v) in zip(itertools.pairwise(self.bounds[0]), keys, strict=True):
            if start == end:
                continue
            rows = slice(start, end)
            if isinstance(self, PagedWrapper) and end == start + 1 and not len(k):
                out[rows], lse[rows] = 0, -torch.inf  # as FA2 does on an H200
                continue
            self.model._operands(q[rows], k, v, causal)
            result = math64.attended(q[rows], k, v, causal, self.options["sm_scale"], window)
            out[rows], lse[rows] = result[0].to(q.dtype), result[1].float()
        return (out, lse) if return_lse else out


class PagedWrapper(Wrapper):
    """A planned batch of sequences in pages; with buffers, of one size for ever."""

    def __init__(
        self, model: Model, backend: str, room_for_parts: int, buffers: dict[str, Tensor]
    ) -> None:
        super().__init__(model, backend, room_for_parts)
        self._buffers = buffers
        self._max_total_num_rows: int | None = None

    def _fill(self, **tables: Tensor) -> None:
        if not self._buffers:
            return
        rows = int(tables["qo_indptr_buf"][-1])
        self._max_total_num_rows = self._max_total_num_rows or rows
        assert rows <= self._max_total_num_rows
        assert tables.keys() == self._buffers.keys()
        for name, values in tables.items():
            buffer = self._buffers[name]
            assert values.numel() <= buffer.numel()
            assert "indices" in name or values.numel() == buffer.numel()
            buffer[: values.numel()] = values

    def plan(  # type: ignore[override]
        self, qo_indptr: Tensor, kv_indptr: Tensor, indices: Tensor, last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, **options: Any,
    ) -> None:  # fmt: skip
        super().plan(qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, **options)
        assert indices.dtype is last_page_len.dtype is torch.int32
        assert indices.is_contiguous()
        assert last_page_len.device.type == "cpu"
        self._fill(
            qo_indptr_buf=qo_indptr, paged_kv_indptr_buf=kv_indptr, paged_kv_indices_buf=indices,
            paged_kv_last_page_len_buf=last_page_len,
        )  # fmt: skip
        self.pages, self.last, self.page_size = indices, last_page_len.tolist(), page_size

    def run(  # type: ignore[override]
        self,
        q: Tensor,
        caches: tuple[Tensor, Tensor],
        *,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> Any:
        k, v = caches
        if self._buffers:  # rows behind the last sequence are nobody's
            q = q[: self.bounds[0][-1]]
        assert k.stride() == v.stride()
        assert (q.shape[1], k.shape[2], q.shape[2]) == self.heads
        assert k.shape[1] == self.page_size
        keys = []
        for (start, end), last in zip(itertools.pairwise(self.bounds[1]), self.last, strict=True):
            count = max(end - start - 1, 0) * self.page_size + last
            assert start < end or not count
            ids = self.pages[start:end].long()
            keys.append((k[ids].flatten(0, 1)[:count], v[ids].flatten(0, 1)[:count]))
        found = self._attend(q, keys, return_lse)
        if out is not None:
            out[: len(q)] = found
        return found if out is None else out
