"""The reference of attention, compiled; for layers with the layer's constants baked in."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from torch_ops import locks, once
from torch_ops.attention.backend import AttentionBackend
from torch_ops.attention.prepared import AttentionSpec, PreparedAttention
from torch_ops.declarations import _attention
from torch_ops.declarations.attention import attention as _declaration
from torch_ops.errors import CaptureError

from ._compiled import compiled, no_compiler, with_own_code

__all__ = ["attention", "prepare", "supports", "supports_call"]

_Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_Key = tuple[AttentionSpec, torch.device, torch.dtype, tuple[bool, bool, bool]]
attention, supports_call = compiled(_declaration)
_lock = locks.lock()
_functions: dict[_Key, _Attend] = {}


def supports(spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    return no_compiler() if device.type == "cpu" else None


def prepare(spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> PreparedAttention:
    return _Compiled(spec)


class _Compiled(PreparedAttention):
    backend = AttentionBackend.INDUCTOR

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ones = (q.shape[0] == 1, q.shape[1] == 1, k.shape[1] == 1)
        key = (self._spec, q.device, q.dtype, ones)
        attend = _functions.get(key) or _function(key)
        return _call(attend, q.contiguous(), k.contiguous(), v.contiguous())


def _call(attend: _Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # One dispatch key set and grad mode for all callers: Dynamo compiles anew for each.
    with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
        return attend(q, k, v)


def _function(key: _Key) -> _Attend:
    """Compile for a class of shapes; layers that are alike share it.

    PyTorch compiles anew for sizes of one and for sizes that were equal at first, and gives up
    after eight times. So there is a code object for each class of ones, and its first call has
    sizes that all differ: one graph then serves every shape of the class.
    """
    spec, device, dtype, ones = key
    with _lock:
        if key in _functions:
            return _functions[key]
        if device.type == "cuda" and once.capturing():
            raise CaptureError(
                f"Attention backend 'inductor': not compiled for {device}, {dtype} and such "
                "shapes, and a stream is capturing; prepare first: run the layer once before"
            )
        attend = _compile(spec, dtype)
        q, k, v = (
            torch.zeros(shape, device=device, dtype=dtype) for shape in _first_shapes(spec, ones)
        )
        _call(attend, q, k, v)
        _functions[key] = attend
        return attend


def _first_shapes(
    spec: AttentionSpec, ones: tuple[bool, bool, bool]
) -> tuple[tuple[int, ...], ...]:
    taken = {spec.num_heads, spec.num_kv_heads, spec.head_dim}
    free = (size for size in itertools.count(3) if size not in taken)
    batch, queries, keys = (1 if one else next(free) for one in ones)
    shape = (batch, keys, spec.num_kv_heads, spec.head_dim)
    return (batch, queries, spec.num_heads, spec.head_dim), shape, shape


def _compile(spec: AttentionSpec, dtype: torch.dtype) -> _Attend:
    shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (q.shape[2], k.shape[2], q.shape[3]) != shape:  # makes constants of them
            raise AssertionError
        return _attention.reference(
            q, k, v, spec.is_causal, spec.scale, spec.window_left, spec.logits_soft_cap
        )[0]

    own = with_own_code(attend, f"attention_{str(dtype).removeprefix('torch.')}")
    compiled_function: _Attend = torch.compile(own, dynamic=True, fullgraph=True)
    return compiled_function
