"""The gradients of attention by its formula, and the checks of what forward left for them."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import checks
from torch_ops.declarations import _attention
from torch_ops.declarations._shared import accumulation_dtype

__all__ = ["check", "gradients"]


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    is_causal: bool,
    scale: float | None,
    window_left: int,
    logits_soft_cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate `_attention.reference` in the accumulation dtype.

    Probabilities are computed anew from q and k: the LSE is of float32, also for float64.
    """
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    group = heads // max(kv_heads, 1)
    scale = head_dim**-0.5 if scale is None else scale
    shape = (batch, kv_heads, group * queries, -1)  # a key head and the queries that read it
    rows = [_wide(t).unflatten(2, (kv_heads, group)) for t in (q, grad)]
    wide_q, wide_grad = (t.permute(0, 2, 3, 1, 4).reshape(*shape[:3], t.shape[-1]) for t in rows)
    wide_k, wide_v = (_wide(t).transpose(1, 2) for t in (k, v))
    logits = wide_q @ wide_k.transpose(-1, -2) * scale
    bent = torch.tanh(logits / logits_soft_cap) if logits_soft_cap > 0 else None
    logits = logits if bent is None else logits_soft_cap * bent
    seen = _attention.mask(queries, keys, is_causal, window_left, q.device)
    if seen is not None:
        logits = logits.masked_fill(~seen.repeat(group, 1), float("-inf"))
    lse = torch.logsumexp(logits, -1, keepdim=True)
    weights = torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0.0))
    change = wide_grad @ wide_v.transpose(-1, -2)
    change = change - (weights * change).sum(-1, keepdim=True)
    if grad_lse is not None:
        by_head = _wide(grad_lse).unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1)
        change = change + by_head.reshape(*shape[:3], 1).to(change.dtype)
    slopes = weights * change * scale
    slopes = slopes if bent is None else slopes * (1 - bent * bent)
    grad_q = (slopes @ wide_k).unflatten(2, (group, queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    grad_k, grad_v = slopes.transpose(-1, -2) @ wide_q, weights.transpose(-1, -2) @ wide_grad
    found = grad_q, grad_k.transpose(1, 2), grad_v.transpose(1, 2)
    first, second, third = (t.to(q.dtype).contiguous() for t in found)
    return first, second, third


def _wide(x: Tensor) -> Tensor:
    """Copy: a BLAS result depends on the alignment of its operands, a view's may be any."""
    return x.to(accumulation_dtype(x.dtype), copy=True, memory_format=torch.contiguous_format)


def check(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    scale: float | None,
    window_left: int,
    logits_soft_cap: float,
) -> None:
    """Refuse what attention does, and results or gradients that aren't of its shapes."""
    _attention.check(op, q, k, v, scale, window_left, logits_soft_cap)
    shape = (*q.shape[:3], v.shape[3])
    for name, tensor in (("out", out), ("grad", grad)):
        checks.shape(op, name, tensor, shape, "that of the result, [B, S_q, H, Dv]")
        checks.like(op, name, tensor, q, "q")
    for name, rows in (("lse", lse), ("grad_lse", grad_lse)):
        if rows is None:
            continue
        checks.shape(op, name, rows, q.shape[:3], "that of an LSE, [B, S_q, H]")
        if rows.dtype != torch.float32:
            checks.refuse(op, name, rows.dtype, "torch.float32", kind=TypeError)
        if rows.device != q.device:
            checks.refuse(op, name, f"on device {rows.device}", f"{q.device}, as 'q'")
