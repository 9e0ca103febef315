"""The reference of attention, compiled; for layers with the layer's constants baked in."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import torch
from torch import Tensor

from torch_ops.attention.backend import AttentionBackend
from torch_ops.attention.prepared import AttentionSpec, PreparedAttention
from torch_ops.declarations import _attention
from torch_ops.declarations.attention import attention as _declaration

from ._compiled import compiled, no_compiler

__all__ = ["attention", "prepare", "supports", "supports_call"]

attention, supports_call = compiled(_declaration)


def supports(spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    return no_compiler() if device.type == "cpu" else None


def prepare(spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> PreparedAttention:
    return _Compiled(_function(spec, dtype))


class _Compiled(PreparedAttention):
    backend = AttentionBackend.INDUCTOR

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self._function = function

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            return self._function(q, k, v)


@functools.cache
def _function(
    spec: AttentionSpec, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Compile one function per spec and dtype; layers that are alike share it."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attention.reference(
            q, k, v, spec.is_causal, spec.scale, spec.window_left, spec.logits_soft_cap
        )[0]

    own = types.FunctionType(
        attend.__code__.replace(co_name=f"attention_{str(dtype).removeprefix('torch.')}"),
        attend.__globals__,
        attend.__name__,
        attend.__defaults__,
        attend.__closure__,
    )
    compiled_function: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.compile(
        own, dynamic=True, fullgraph=True
    )
    return compiled_function
