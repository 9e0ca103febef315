"""PyTorch's flash attention on NVIDIA GPUs, forward and backward, where it does what the ops do.

Its masks are aligned bottom-right, its LSE is a natural logarithm, and queries of a group share a
key head. It has no soft cap. These are the kernels below `scaled_dot_product_attention`, which
hands them no window.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_ops.limits import HALVES

__all__ = ["backward", "forward", "takes"]

_aten = torch.ops.aten
_GRID = 2**16  # batches and heads are counted by blocks
_VECTOR = 16  # bytes that are read at once
_LONGEST = 2**31 - 1  # the kernels' windows have 32 bits


def takes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    window_left: int,
    logits_soft_cap: float,
) -> bool:
    """Whether a call is one of flash attention's: of halves, each query at a key."""
    batch, queries, heads, head_dim = q.shape
    return (
        q.dtype in HALVES
        and not logits_soft_cap
        and (scale is None or scale > 0)  # -inf of the mask is multiplied, too
        and head_dim % 8 == 0
        and head_dim == v.shape[3]
        and 0 < head_dim <= 256
        and min(batch, queries, heads, k.shape[1]) > 0
        and max(batch, heads) < _GRID
        and (queries <= k.shape[1] or not (is_causal or window_left >= 0))
        and _has_flash(q)
    )


def _has_flash(x: Tensor) -> bool:
    if x.device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(x.device) >= (8, 0)


def forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, window_left: int
) -> tuple[Tensor, Tensor]:
    """Give ``[B, S_q, H, D]`` and the LSE ``[B, S_q, H]``.

    The kernels leave an infinite LSE where a sum of weights is NaN.
    """
    out, lse, *_ = _aten._flash_attention_forward(
        *map(_readable, (q, k, v)), None, None, q.shape[1], k.shape[1], 0.0, is_causal, False,
        scale=scale, window_size_left=min(window_left, _LONGEST), window_size_right=-1,
    )  # fmt: skip
    lse = lse.transpose(1, 2).contiguous()
    return out.contiguous(), lse.masked_fill_(lse == math.inf, math.nan)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    is_causal: bool,
    scale: float | None,
    window_left: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradients of q, k and v; the sums of grad_q are in no fixed order.

    They are where ``torch.use_deterministic_algorithms(True)`` asks for that.
    """
    state = q.new_empty(2, dtype=torch.uint64)  # of random numbers: nothing is dropped
    found = _aten._flash_attention_backward(
        *map(_readable, (grad, q, k, v, out)), lse.transpose(1, 2).contiguous(), None, None,
        q.shape[1], k.shape[1], 0.0, is_causal, state, state, scale=scale,
        window_size_left=min(window_left, _LONGEST), window_size_right=-1,
    )  # fmt: skip
    grad_q, grad_k, grad_v = (t.contiguous() for t in found)
    return grad_q, grad_k, grad_v


def _readable(x: Tensor) -> Tensor:
    """Copy a tensor whose rows can't be read in vectors."""
    steps = [stride * x.element_size() for stride in x.stride()[:-1]]
    readable = x.stride(-1) == 1 and not any(step % _VECTOR for step in (*steps, x.data_ptr()))
    return x if readable else x.clone(memory_format=torch.contiguous_format)
