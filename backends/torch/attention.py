"""The reference of attention, and PyTorch's own kernels for layers, each pinned."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_ops.attention.backend import AttentionBackend
from torch_ops.attention.calls import PreparedCalls
from torch_ops.attention.prepared import AttentionSpec, PreparedAttention
from torch_ops.declarations._attention import mask
from torch_ops.declarations.attention import attention as _declaration
from torch_ops.declarations.paged_decode import paged_decode
from torch_ops.declarations.paged_prefill import paged_prefill
from torch_ops.declarations.varlen_attention import varlen_attention

__all__ = ["attention", "prepare", "supports", "supports_paged", "supports_ragged"]

_Flags = tuple[Tensor | None, bool]
_Kernel = Callable[[Tensor, Tensor, Tensor, _Flags, float], Tensor]
attention = _declaration.reference
_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def supports(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, backend: AttentionBackend
) -> str | None:
    if spec.logits_soft_cap > 0:
        return f"logits_soft_cap {spec.logits_soft_cap} (supported: 0.0)"
    if backend is AttentionBackend.TORCH_MATH:
        return None
    if backend is AttentionBackend.TORCH_CUDNN and device.type != "cuda":
        return f"device {device} (supported: cuda)"
    if device.type != "cuda":
        return None
    if dtype not in _HALVES:
        return f"dtype {dtype} (supported on cuda: torch.float16, torch.bfloat16)"
    if spec.window_left >= 0:
        return f"window_left {spec.window_left} (supported on cuda: -1)"
    if spec.head_dim > 256 or spec.head_dim % 8:
        return f"head_dim {spec.head_dim} (supported on cuda: multiples of 8 up to 256)"
    if backend is AttentionBackend.TORCH_CUDNN and torch.version.hip:
        return "cuDNN needs an NVIDIA GPU"
    return None


def supports_ragged(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, backend: AttentionBackend
) -> str | None:
    if backend is AttentionBackend.TORCH_MATH:
        return None
    return "ragged and paged calls (supported: dense ones; torch_math takes them)"


supports_paged = supports_ragged


def prepare(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, backend: AttentionBackend
) -> PreparedAttention:
    if backend is AttentionBackend.TORCH_MATH:
        return _Pinned(spec, backend, _math)
    if backend is AttentionBackend.TORCH_CUDNN:
        return _Pinned(spec, backend, _cudnn)
    return _Pinned(spec, backend, _flash_cuda if device.type == "cuda" else _flash_cpu)


class _Pinned(PreparedCalls):
    """One ATen kernel, given ``[B, heads, S, D]`` views and a mask where its flag won't do.

    Ragged and paged calls have no kernel of PyTorch's: they run the references.
    """

    varlen_attention = varlen_attention.reference
    paged_prefill = paged_prefill.reference
    paged_decode = paged_decode.reference

    def __init__(self, spec: AttentionSpec, backend: AttentionBackend, kernel: _Kernel) -> None:
        super().__init__(spec)
        self.backend = backend
        self._kernel = kernel
        self._sign = (spec.scale > 0) - (spec.scale < 0)
        self._scale = abs(spec.scale) or 1.0

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec, queries, keys = self.spec, q.shape[1], k.shape[1]
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        empty = max(queries - keys, 0) if spec.is_causal else 0
        if empty:  # the kernels disagree on rows with nothing to attend; they are zeros here
            out = q.new_zeros(q.shape)
            out[:, empty:] = self.run(q[:, empty:], k, v)
            return out
        if self._sign != 1:  # flash kernels multiply -inf of the mask by the scale, too
            q = q * self._sign
        if queries == 1 and spec.window_left < 0:  # the last query sees all keys
            return self._one_query(q, k, v)
        out = self._kernel(q.transpose(1, 2), *_heads(k, v), self._flags(q, keys), self._scale)
        return out.transpose(1, 2).contiguous()

    def _one_query(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Read each key head once: its query heads take the place of the queries."""
        batch, _, heads, head_dim = q.shape
        kv_heads = self.spec.num_kv_heads
        grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)
        out = self._kernel(grouped, *_heads(k, v), (None, False), self._scale)
        return out.reshape(batch, 1, heads, head_dim)

    def _flags(self, q: Tensor, keys: int) -> tuple[Tensor | None, bool]:
        """Give an additive mask, or None and the kernel's causal flag, which is top-left."""
        spec, queries = self.spec, q.shape[1]
        if spec.window_left < 0 and (not spec.is_causal or queries == keys):
            return None, spec.is_causal
        if q.device.type == "cuda" and self._kernel is _flash_cuda:
            return None, spec.is_causal  # this one aligns bottom-right
        seen = mask(queries, keys, spec.is_causal, spec.window_left, q.device)
        assert seen is not None
        return torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, float("-inf")), False


def _heads(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k.transpose(1, 2), v.transpose(1, 2)


def _math(q: Tensor, k: Tensor, v: Tensor, flags: _Flags, scale: float) -> Tensor:
    kernel = _aten._scaled_dot_product_attention_math
    gqa = q.shape[1] != k.shape[1]
    out: Tensor = kernel(q, k, v, flags[0], 0.0, flags[1], scale=scale, enable_gqa=gqa)[0]
    return out


def _flash_cpu(q: Tensor, k: Tensor, v: Tensor, flags: _Flags, scale: float) -> Tensor:
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = kernel(q, k, v, 0.0, flags[1], attn_mask=flags[0], scale=scale)[0]
    return out


def _flash_cuda(q: Tensor, k: Tensor, v: Tensor, flags: _Flags, scale: float) -> Tensor:
    out: Tensor = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, flags[1], scale=scale)[0]
    return out


def _cudnn(q: Tensor, k: Tensor, v: Tensor, flags: _Flags, scale: float) -> Tensor:
    bias = flags[0]
    if bias is not None:
        bias = bias.expand(q.shape[0], q.shape[1], -1, -1)
    kernel = _aten._scaled_dot_product_cudnn_attention
    out: Tensor = kernel(q, k, v, bias, False, 0.0, flags[1], scale=scale)[0]
    return out
