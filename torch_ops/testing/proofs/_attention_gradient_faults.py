"""Plain gradients of attention in pieces, each of which a planted fault replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.arithmetic import compute_dtype
from torch_ops.testing.faults import floored, generic_mutants, raised
from torch_ops.testing.proof import Mutant
from torch_ops.testing.proofs import _attention_faults as forward
from torch_ops.testing.proofs._attention import visible

Change = Callable[[Tensor], Tensor]
Rows = Callable[[Tensor, Tensor, Tensor | float], Tensor]
_FIELDS = {"q": 0, "k": 1, "v": 2}


def _same(x: Tensor) -> Tensor:
    return x


def _rows(p: Tensor, dp: Tensor, more: Tensor | float) -> Tensor:
    """The change of a logit's exponential, relative to it."""
    return dp - (p * dp).sum(-1, keepdim=True) + more


def _bend(s: Tensor, cap: float) -> Tensor:
    return 1 - (s / cap).tanh() ** 2 if cap > 0 else torch.ones_like(s)


def _group_sum(parts: Tensor, heads: Tensor, count: int) -> Tensor:
    found = parts.new_zeros(parts.shape[0], count, *parts.shape[2:])
    return found.index_add_(1, heads, parts)


def gradient(
    mask: forward.Mask = visible,
    hide: Callable[[Tensor, Tensor, float], Tensor] = forward.hide,
    softmax: Callable[[Tensor, Tensor], Tensor] = forward.softmax,
    head_map: Callable[[int, int], Tensor] = forward.group_of,
    scale: Callable[[float], float] = float,
    key_scale: Callable[[float], float] = float,
    rows: Rows = _rows,
    bend: Callable[[Tensor, float], Tensor] = _bend,
    collect: Callable[[Tensor, Tensor, int], Tensor] = _group_sum,
    finish: Callable[[Tensor, torch.dtype], Tensor] = forward.nearest,
    weights: Change = _same,
    lse: Change = _same,
    **change: Change,
) -> Callable[..., tuple[Tensor, ...]]:
    """Returns the gradients of attention, made of these pieces."""

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_: Tensor, grad: Tensor,
        grad_lse: Tensor | None = None, is_causal: bool = False, scale_: float | None = None,
        window_left: int = -1, cap: float = 0.0,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        work, size = compute_dtype(q.dtype), q.shape[-1]
        given = {"q": q, "k": k, "v": v, "grad": grad}
        queries, keys, values, d_out = (
            change.get(n, _same)(t.to(work).transpose(1, 2)) for n, t in given.items()
        )
        heads = head_map(q.shape[2], k.shape[2])
        keys, values = keys[:, heads], values[:, heads]
        factor = scale(size**-0.5 if scale_ is None else scale_)
        s = queries @ keys.transpose(-1, -2) * factor
        seen = mask(q.shape[1], k.shape[1], is_causal, window_left)
        p = softmax(hide(s, seen, cap), seen)
        more = 0.0 if grad_lse is None else lse(grad_lse.to(work).transpose(1, 2).unsqueeze(-1))
        ds = p * rows(p, d_out @ values.transpose(-1, -2), more) * bend(s, cap)
        dk = collect(ds.transpose(-1, -2) @ queries * key_scale(factor), heads, k.shape[2])
        dv = collect(weights(p).transpose(-1, -2) @ d_out, heads, k.shape[2])
        found = (ds @ keys * factor, dk, dv)
        return tuple(finish(t, q.dtype).transpose(1, 2).contiguous() for t in found)

    return kernel


def _first_of_group(parts: Tensor, heads: Tensor, count: int) -> Tensor:
    new = torch.ones_like(heads, dtype=torch.bool)
    new[1:] = heads[1:] != heads[:-1]
    return _group_sum(parts * new.view(1, -1, 1, 1), heads, count)


def _group_mean(parts: Tensor, heads: Tensor, count: int) -> Tensor:
    return _group_sum(parts, heads, count) / max(len(heads) // max(count, 1), 1)


def _of_row_before(p: Tensor, dp: Tensor, more: Tensor | float) -> Tensor:
    return dp - (p * dp).sum(-1, keepdim=True).roll(1, -2) + more


def _of_all_rows(p: Tensor, dp: Tensor, more: Tensor | float) -> Tensor:
    return dp - (p * dp).sum((-1, -2), keepdim=True) + more


def _summed_dp(p: Tensor, dp: Tensor, more: Tensor | float) -> Tensor:
    return dp - dp.sum(-1, keepdim=True) + more


def mutants() -> tuple[Mutant, ...]:
    """Faults of the gradients of attention."""

    def mutant(name: str, kills: str, **with_: Any) -> Mutant:
        return Mutant(name, tuple(kills.split()), gradient(**with_))

    return (
        mutant("causal_top_left", "bound", mask=forward.top_left),
        mutant("causal_one_more", "later_keys bound", mask=forward.one_more),
        mutant("causal_ignored", "later_keys bound", mask=forward.no_causal),
        mutant("window_one_more", "unseen_keys later_keys bound", mask=forward.window(1)),
        mutant("window_one_less", "bound", mask=forward.window(-1)),
        mutant("window_ignored", "unseen_keys later_keys bound", mask=forward.no_window),
        mutant("mask_of_minus_10", "unseen_keys later_keys bound", hide=forward.mild_mask),
        mutant("no_cap", "bound", hide=forward.uncapped),
        mutant("slope_of_cap_left_out", "bound", bend=lambda s, cap: torch.ones_like(s)),
        mutant("empty_row_is_mean", "bound", softmax=forward.mean_of_empty),
        mutant("half_denominator", "bound", softmax=forward.stale_denominator),
        mutant("last_key_dropped", "bound", softmax=forward.without_last),
        mutant("scale_1_percent_more", "bound", scale=lambda s: s * 1.01),
        mutant("scale_of_keys_left_out", "bound", key_scale=lambda s: 1.0),
        mutant("row_sum_left_out", "bound", rows=lambda p, dp, more: dp + more),
        mutant("row_sum_of_row_before", "lone_rows bound", rows=_of_row_before),
        mutant("row_sum_of_all_rows", "lone_rows bound", rows=_of_all_rows),
        mutant("row_sum_of_gradients", "bound", rows=_summed_dp),
        mutant("lse_left_out", "bound", lse=torch.zeros_like),
        mutant("lse_subtracted", "bound", lse=torch.neg),
        mutant("lse_of_row_before", "lone_rows bound", lse=lambda g: g.roll(1, -2)),
        mutant("weights_in_bfloat16", "bound", weights=lambda p: p.bfloat16().to(p.dtype)),
        mutant("absolute_grads", "negated_grads bound", grad=torch.abs),
        mutant("positive_grads", "negated_grads bound", grad=lambda g: g.clamp(min=0)),
        mutant("rounded_down", "negated_grads", finish=floored),
        mutant("rounded_up", "negated_grads", finish=raised),
        mutant("grads_clipped", "scaled_grads bound", grad=lambda g: g.clamp(-2, 2)),
        mutant("grads_on_grid", "scaled_grads bound", grad=lambda g: (g * 4).round() / 4),
        mutant("grads_plus_tiny", "scaled_grads zero_grads bound", grad=lambda g: g + 2**-5),
        mutant("rows_plus_tiny", "zero_grads bound",
               rows=lambda p, dp, more: _rows(p, dp, more) + 2**-5),
        mutant("result_plus_tiny", "zero_grads unseen_keys bound",
               finish=lambda t, dtype: (t + 2**-7).to(dtype)),
        mutant("absolute_queries", "negated_logits bound", q=torch.abs),
        mutant("positive_keys", "negated_logits bound", k=lambda x: x.clamp(min=0)),
        mutant("queries_shifted", "negated_logits bound", q=lambda x: x + 0.125),
        mutant("queries_on_grid", "moved_scale bound", q=lambda x: (x * 4).round() / 4),
        mutant("queries_clipped", "moved_scale bound", q=lambda x: x.clamp(-1, 1)),
        mutant("keys_clipped", "moved_scale bound", k=lambda x: x.clamp(-1, 1)),
        mutant("heads_modulo", "swapped bound", head_map=forward.modulo),
        mutant("key_head_0", "swapped bound", head_map=forward.head_0),
        mutant("group_off_by_one", "swapped bound", head_map=forward.off_by_one),
        mutant("keys_of_sequence_0", "swapped bound", k=forward.sequence_0),
        mutant("values_of_sequence_0", "swapped bound", v=forward.sequence_0),
        mutant("first_head_of_a_group_alone", "bound", collect=_first_of_group),
        mutant("mean_over_a_group", "bound", collect=_group_mean),
        *generic_mutants(gradient()),
    )  # fmt: skip
