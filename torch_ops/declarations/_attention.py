"""What the attention ops share: the reference with its LSE, and the checks."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import checks
from torch_ops.declarations._shared import accumulation_dtype
from torch_ops.training import Run, Saved

__all__ = [
    "attend",
    "check",
    "check_heads",
    "check_numbers",
    "check_scale",
    "differentiate",
    "mask",
    "reference",
]

_LARGEST = torch.finfo(torch.float32).max


def mask(
    queries: int, keys: int, is_causal: bool, window_left: int, device: torch.device
) -> Tensor | None:
    """Give a bool ``[queries, keys]`` mask, True where a query attends, or None for all.

    The last query stands at the last key. ``window_left`` counts the keys before the query's own.
    """
    if not is_causal and window_left < 0:
        return None
    query = torch.arange(queries, device=device).unsqueeze(1) + (keys - queries)
    key = torch.arange(keys, device=device).unsqueeze(0)
    seen = key <= query if is_causal else torch.ones_like(key <= query)
    return seen & (query - key <= window_left) if window_left >= 0 else seen


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    window_left: int,
    logits_soft_cap: float,
) -> tuple[Tensor, Tensor]:
    """Attend in the accumulation dtype; gives ``[B, S, H, Dv]`` and the LSE ``[B, S, H]``."""
    seen = mask(q.shape[1], k.shape[1], is_causal, window_left, q.device)
    return attend(q, k, v, seen, scale, logits_soft_cap)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    scale: float | None,
    logits_soft_cap: float,
) -> tuple[Tensor, Tensor]:
    """Attend under a mask that broadcasts to ``[B, K, H / K, S_q, S_kv]``, True where seen."""
    batch, queries, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    # Copies: a BLAS result depends on the alignment of its operands, a view's may be any.
    wide_q, wide_k, wide_v = (
        t.to(
            accumulation_dtype(t.dtype), copy=True, memory_format=torch.contiguous_format
        ).transpose(1, 2)
        for t in (q, k, v)
    )
    wide_q = wide_q.reshape(batch, kv_heads, heads // max(kv_heads, 1), queries, head_dim)
    logits = wide_q @ wide_k.unsqueeze(2).transpose(-1, -2)
    logits = logits * (head_dim**-0.5 if scale is None else scale)
    if logits_soft_cap > 0:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    if seen is not None:
        logits = logits.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(logits, -1, keepdim=True)
    weights = torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0.0))
    out = (weights @ wide_v.unsqueeze(2)).flatten(1, 2).transpose(1, 2)
    lse = lse.squeeze(-1).flatten(1, 2).transpose(1, 2)
    return out.to(q.dtype).contiguous(), lse.float().contiguous()


def differentiate(
    run: Run, grad: Tensor, grad_lse: Tensor | None, saved: Saved
) -> tuple[Tensor, Tensor, Tensor]:
    """Call `attention_backward` with what forward kept."""
    tensors = [saved[name] for name in ("q", "k", "v", "out0", "out1")]
    numbers = [saved[n] for n in ("is_causal", "scale", "window_left", "logits_soft_cap")]
    found: tuple[Tensor, Tensor, Tensor] = run(*tensors, grad, grad_lse, *numbers)
    return found


def check(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window_left: int,
    logits_soft_cap: float,
) -> None:
    """Refuse tensors that don't fit together and numbers out of range."""
    checks.float_dtype(op, "q", q)
    checks.rank(op, "q", q, 4, "[B, S_q, H, D]")
    batch, _, heads, head_dim = q.shape
    if k.dim() != 4 or k.shape[0] != batch or k.shape[3] != head_dim:
        wanted = f"[{batch}, S_kv, K, {head_dim}], B and D of 'q'"
        checks.refuse(op, "k", f"of shape {list(k.shape)}", wanted)
    if v.dim() != 4 or v.shape[:3] != k.shape[:3]:
        wanted = f"{[*k.shape[:3], 'D']}, B, S_kv and K of 'k'"
        checks.refuse(op, "v", f"of shape {list(v.shape)}", wanted)
    check_heads(op, "k", heads, k.shape[2])
    checks.like(op, "k", k, q, "q")
    checks.like(op, "v", v, q, "q")
    check_numbers(op, head_dim, scale, window_left, logits_soft_cap)


def check_heads(op: str, argument: str, heads: int, kv_heads: int) -> None:
    """Refuse key heads that the query heads can't be shared out to."""
    if heads % kv_heads if kv_heads else heads:
        checks.refuse(
            op, argument, f"of {kv_heads} heads", f"a divisor of the {heads} heads of 'q'"
        )


def check_scale(op: str, scale: float, accepted: str) -> None:
    """Refuse a scale that isn't finite in float32."""
    if not abs(scale) <= _LARGEST:
        checks.refuse(op, "scale", repr(scale), accepted)


def check_numbers(
    op: str, head_dim: int, scale: float | None, window_left: int, logits_soft_cap: float
) -> None:
    """Refuse numbers out of range."""
    if scale is None:
        if not head_dim:
            checks.refuse(op, "scale", "None for heads of no elements", "a number where D is 0")
    else:
        check_scale(op, scale, "a finite number or None")
    if window_left < -1:
        checks.refuse(op, "window_left", repr(window_left), "-1 for none, or a number >= 0")
    if not 0 <= logits_soft_cap <= _LARGEST:
        accepted = "a number >= 0, finite in float32"
        checks.refuse(op, "logits_soft_cap", repr(logits_soft_cap), accepted)
