"""A plain attention in pieces, each of which a planted fault replaces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.arithmetic import compute_dtype
from torch_ops.testing.batch_faults import batch_mutants
from torch_ops.testing.faults import floored, generic_mutants, raised
from torch_ops.testing.proof import Mutant
from torch_ops.testing.proofs._attention import visible

Change = Callable[[Tensor], Tensor]
Mask = Callable[[int, int, bool, int], Tensor]


def _same(x: Tensor) -> Tensor:
    return x


def _cap(s: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(s / cap) if cap > 0 else s


def hide(s: Tensor, seen: Tensor, cap: float) -> Tensor:
    return _cap(s, cap).masked_fill(~seen, -math.inf)


def softmax(s: Tensor, seen: Tensor) -> Tensor:
    return torch.softmax(s, -1).masked_fill(~seen.any(-1, keepdim=True), 0.0)


def group_of(heads: int, kv_heads: int) -> Tensor:
    return torch.arange(heads) // max(heads // max(kv_heads, 1), 1)


def nearest(y: Tensor, dtype: torch.dtype) -> Tensor:
    return y.to(dtype)


def attention(
    mask: Mask = visible,
    hide: Callable[[Tensor, Tensor, float], Tensor] = hide,
    softmax: Callable[[Tensor, Tensor], Tensor] = softmax,
    head_map: Callable[[int, int], Tensor] = group_of,
    scale: Callable[[float], float] = float,
    q: Change = _same,
    k: Change = _same,
    v: Change = _same,
    logits: Change = _same,
    finish: Callable[[Tensor, torch.dtype], Tensor] = nearest,
    lse: Change = _same,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns attention with its LSE, made of these pieces."""
    change = {"q": q, "k": k, "v": v}

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale_: float | None = None,
        window_left: int = -1, logits_soft_cap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        work = compute_dtype(q.dtype)
        queries, keys, values = (
            change[n](t.to(work).transpose(1, 2)) for n, t in (("q", q), ("k", k), ("v", v))
        )
        heads = head_map(q.shape[2], k.shape[2])
        keys, values = keys[:, heads], values[:, heads]
        factor = scale(q.shape[-1] ** -0.5 if scale_ is None else scale_)
        s = logits(queries @ keys.transpose(-1, -2) * factor)
        seen = mask(q.shape[1], k.shape[1], is_causal, window_left)
        s = hide(s, seen, logits_soft_cap)
        out = finish(softmax(s, seen) @ values, q.dtype).transpose(1, 2).contiguous()
        return out, lse(torch.logsumexp(s, -1)).transpose(1, 2).float().contiguous()

    return kernel


def only_out(kernel: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """The kernel without its LSE."""
    return lambda *args: kernel(*args)[0]


def top_left(queries: int, keys: int, is_causal: bool, window_left: int) -> Tensor:
    if not is_causal:
        return visible(queries, keys, is_causal, window_left)
    square = max(queries, keys)
    return visible(square, square, is_causal, window_left)[:queries, :keys]


def one_more(queries: int, keys: int, is_causal: bool, window_left: int) -> Tensor:
    """Causal, but the next key is visible too."""
    seen = visible(queries, keys, is_causal, window_left)
    return seen | seen.roll(1, -1) if is_causal and keys > 1 else seen


def window(amount: int) -> Mask:
    def mask(queries: int, keys: int, is_causal: bool, window_left: int) -> Tensor:
        moved = window_left + amount if window_left >= 0 else window_left
        return visible(queries, keys, is_causal, max(moved, 0) if window_left >= 0 else -1)

    return mask


def no_causal(queries: int, keys: int, is_causal: bool, window_left: int) -> Tensor:
    return visible(queries, keys, False, window_left)


def no_window(queries: int, keys: int, is_causal: bool, window_left: int) -> Tensor:
    return visible(queries, keys, is_causal, -1)


def _cap_after_mask(s: Tensor, seen: Tensor, cap: float) -> Tensor:
    return _cap(s.masked_fill(~seen, -math.inf), cap)


def mild_mask(s: Tensor, seen: Tensor, cap: float) -> Tensor:
    return torch.where(seen, _cap(s, cap), _cap(s, cap) - 10)


def _lowest_mask(s: Tensor, seen: Tensor, cap: float) -> Tensor:
    """The lowest finite number instead of -inf: an empty row is the mean of all values."""
    return _cap(s, cap).masked_fill(~seen, torch.finfo(s.dtype).min)


def uncapped(s: Tensor, seen: Tensor, cap: float) -> Tensor:
    return s.masked_fill(~seen, -math.inf)


def stale_denominator(s: Tensor, seen: Tensor) -> Tensor:
    """Masked after normalizing over every key."""
    return softmax(s, seen) * 0.5


def mean_of_empty(s: Tensor, seen: Tensor) -> Tensor:
    empty = ~seen.any(-1, keepdim=True)
    return softmax(s, seen).masked_fill(empty, 1 / max(s.shape[-1], 1))


def without_last(s: Tensor, seen: Tensor) -> Tensor:
    """The last key's weight is lost."""
    p = softmax(s, seen)
    return torch.cat([p[..., :-1], torch.zeros_like(p[..., -1:])], -1)


def with_sink(s: Tensor, seen: Tensor) -> Tensor:
    """A hundredth of the largest weight more in the denominator."""
    top = s.amax(-1, keepdim=True).clamp(min=-1e30) if s.shape[-1] else s
    weights = torch.exp(s - top)
    return weights / (weights.sum(-1, keepdim=True) + 1e-2)


def eighth(s: Tensor, seen: Tensor) -> Tensor:
    """Weights on a grid of eighths, as a narrow format holds them."""
    return (softmax(s, seen) * 8).round() / 8


def modulo(heads: int, kv_heads: int) -> Tensor:
    return torch.arange(heads) % max(kv_heads, 1)


def head_0(heads: int, kv_heads: int) -> Tensor:
    return torch.zeros(heads if kv_heads else 0, dtype=torch.int64)


def off_by_one(heads: int, kv_heads: int) -> Tensor:
    group = max(heads // max(kv_heads, 1), 1)
    return ((torch.arange(heads) + 1) // group).clamp(max=max(kv_heads - 1, 0))


def _always_2(heads: int, kv_heads: int) -> Tensor:
    return (torch.arange(heads) // 2).clamp(max=max(kv_heads - 1, 0))


def _power_of_two_group(heads: int, kv_heads: int) -> Tensor:
    group = 1 << ((heads // max(kv_heads, 1)).bit_length() - 1) if heads else 1
    return (torch.arange(heads) // group).clamp(max=max(kv_heads - 1, 0))


def _grid(x: Tensor) -> Tensor:
    return (x * 4).round() / 4


def _clip(limit: float) -> Change:
    return lambda x: x.clamp(-limit, limit)


def sequence_0(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape) if len(x) else x


def times_zero_of_next(x: Tensor) -> Tensor:
    """Adds zero times what comes next, as a tile does that reaches over the end."""
    return x + 0 * x.roll(-1, 0)


def _previous(axis: int) -> Change:
    return lambda x: x.roll(1, axis)


def _query_head_0(x: Tensor) -> Tensor:
    return x[:, :1].expand(x.shape) if x.shape[1] else x


def mutants(convert: Callable[..., Any]) -> tuple[Mutant, ...]:
    """Faults of attention; `convert` turns a kernel with LSE into the op's form."""

    def mutant(name: str, kills: str, **pieces: Any) -> Mutant:
        return Mutant(name, tuple(kills.split()), convert(attention(**pieces)))

    return (
        mutant("causal_top_left", "bound", mask=top_left),
        mutant("causal_one_more", "unseen_keys masked_weight bound", mask=one_more),
        mutant("causal_ignored", "bound", mask=no_causal),
        mutant("window_one_more", "unseen_keys masked_weight bound", mask=window(1)),
        mutant("window_one_less", "bound", mask=window(-1)),
        mutant("window_ignored", "unseen_keys masked_weight bound", mask=no_window),
        mutant("cap_after_mask", "unseen_keys masked_weight bound", hide=_cap_after_mask),
        mutant("mask_of_minus_10", "unseen_keys masked_weight bound", hide=mild_mask),
        mutant("mask_of_lowest", "bound", hide=_lowest_mask, softmax=lambda s, _: s.softmax(-1)),
        mutant("no_cap", "bound", hide=uncapped),
        mutant("empty_row_is_mean", "bound", softmax=mean_of_empty),
        mutant("scale_1_percent_more", "bound", scale=lambda s: s * 1.01),
        mutant("scale_squared", "bound", scale=lambda s: s * s),
        mutant("no_scale", "bound", scale=lambda s: 1.0),
        mutant("logits_in_bfloat16", "bound", logits=lambda s: s.bfloat16().to(s.dtype)),
        mutant("keys_shifted", "bound", k=_previous(2)),
        mutant("absolute_values", "negated_values bound", v=torch.abs),
        mutant("positive_values", "negated_values bound", v=lambda x: x.clamp(min=0)),
        mutant("rounded_down", "negated_values", finish=floored),
        mutant("rounded_up", "negated_values", finish=raised),
        mutant("values_on_grid", "scaled_values bound", v=_grid),
        mutant("values_clipped", "scaled_values bound", v=_clip(2)),
        mutant("constant_added", "scaled_values bound", v=lambda x: x + 2**-5),
        mutant("queries_on_grid", "moved_scale bound", q=_grid),
        mutant("queries_clipped", "moved_scale bound", q=_clip(1)),
        mutant("keys_clipped", "moved_scale bound", k=_clip(1)),
        mutant("absolute_queries", "negated_logits bound", q=torch.abs),
        mutant("positive_keys", "negated_logits bound", k=lambda x: x.clamp(min=0)),
        mutant("queries_shifted", "negated_logits bound", q=lambda x: x + 0.125),
        mutant("half_denominator", "constant_values bound", softmax=stale_denominator),
        mutant("last_key_dropped", "constant_values bound", softmax=without_last),
        mutant("sink_in_denominator", "constant_values bound", softmax=with_sink),
        mutant("weights_oneighths", "constant_values bound", softmax=eighth),
        mutant("keys_of_sequence_0", "sequences bound", k=sequence_0),
        mutant("values_of_sequence_0", "sequences bound", v=sequence_0),
        mutant("queries_of_sequence_0", "sequences bound", q=sequence_0),
        mutant("next_values_times_zero", "sequences", v=times_zero_of_next),
        mutant("heads_modulo", "heads repeated_heads bound", head_map=modulo),
        mutant("key_head_0", "heads bound", head_map=head_0),
        mutant("group_off_by_one", "heads bound", head_map=off_by_one),
        mutant("group_always_2", "repeated_heads bound", head_map=_always_2),
        mutant("group_power_of_two", "repeated_heads bound", head_map=_power_of_two_group),
        mutant("query_head_0", "heads bound", q=_query_head_0),
        mutant("head_before", "bound", q=_previous(1)),
        *generic_mutants(convert(attention())),
        *batch_mutants(convert(attention()), (0, 1, 2)),
    )


def lse_mutants() -> tuple[Mutant, ...]:
    """Faults that only the LSE shows."""

    def mutant(name: str, change: Change, kills: str = "split_keys bound") -> Mutant:
        return Mutant(name, tuple(kills.split()), attention(lse=change))

    return (
        mutant("lse_base_2", lambda s: s / math.log(2)),
        mutant("lse_finite_for_empty", lambda s: s.clamp(min=-1e4), "bound"),
        mutant(
            "lse_plus_inf_for_empty", lambda s: s.masked_fill(s == -math.inf, math.inf), "bound"
        ),
        mutant("lse_in_bfloat16", lambda s: s.bfloat16().to(s.dtype)),
        mutant("lse_of_one_more_key", lambda s: torch.logaddexp(s, torch.zeros_like(s))),
        mutant("lse_negated", torch.neg),
    )
