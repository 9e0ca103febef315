"""Planted faults of running experts: a plain kernel in pieces, each of which a fault replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.arithmetic import compute_dtype
from torch_ops.testing.faults import Kernel, generic_mutants
from torch_ops.testing.proof import Mutant


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    half = gate_up.shape[-1] // 2
    return gate_up[..., :half], gate_up[..., half:]


def _silu(gate: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate)


def _selected(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Which assignments there are, and of which expert."""
    there = (ids >= 0) & (ids < experts)
    return there, ids.masked_fill(~there, 0).long()


def _nothing(out: Tensor, x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    return out


def experts(
    halves: Callable[[Tensor], tuple[Tensor, Tensor]] = _halves,
    activation: Callable[[Tensor], Tensor] = _silu,
    selected: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] = _selected,
    share: Callable[[Tensor], Tensor] = lambda weights: weights,
    part: Callable[[Tensor], Tensor] = lambda part: part,
    also: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _nothing,
    finish: Callable[[Tensor, torch.dtype], Tensor] = lambda y, dtype: y.to(dtype),
    masked: bool = True,
) -> Kernel:
    """Returns a layer of experts made of these pieces."""

    def kernel(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Any:
        work = compute_dtype(x.dtype)
        wide, first, second = (t.contiguous().to(work) for t in (x, w_gate_up, w_down))
        out = wide.new_zeros(wide.shape)
        there, expert = selected(ids.contiguous(), weights, second.shape[0])
        if not second.shape[0]:
            return finish(out, x.dtype)
        for j in range(ids.shape[1]):
            gate, up = halves(torch.einsum("th,tfh->tf", wide, first[expert[:, j]]))
            hidden = (activation(gate) * up).to(x.dtype).to(work)
            result = part(torch.einsum("tf,thf->th", hidden, second[expert[:, j]]))
            weight, chosen = share(weights.contiguous())[:, j, None], there[:, j, None]
            if masked:
                out = out + (result * weight).masked_fill(~chosen, 0.0)
            else:
                out = out + result * (weight * chosen)
        return finish(also(out, wide, first, second), x.dtype)

    return kernel


def _wrapped(ids: Tensor, _: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """-1 is the last expert, and the one behind the last the first."""
    return torch.ones_like(ids, dtype=torch.bool), ids.long() % max(count, 1)


def _clamped(ids: Tensor, _: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return torch.ones_like(ids, dtype=torch.bool), ids.long().clamp(0, max(count - 1, 0))


def _negative_only(ids: Tensor, _: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return ids >= 0, ids.long().clamp(0, max(count - 1, 0))


def _flat(ids: Tensor, _: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first T of T * k assignments, one a token."""
    there, expert = _selected(ids, _, count)
    if not ids.shape[1]:
        return there, expert
    return there, expert.flatten()[: len(ids), None].expand(ids.shape)


def _next_expert(ids: Tensor, _: Tensor, count: int) -> tuple[Tensor, Tensor]:
    there, expert = _selected(ids, _, count)
    return there, (expert + 1) % max(count, 1)


def _first_dropped(ids: Tensor, _: Tensor, count: int) -> tuple[Tensor, Tensor]:
    there, expert = _selected(ids, _, count)
    return there & (torch.arange(ids.shape[1]) > 0), expert


def _reads(pick: Callable[[Tensor, Tensor], Tensor]) -> Kernel:
    """Adds nothing of experts that nobody chose, and reads them for it."""
    return experts(also=lambda out, x, first, second: out + 0.0 * pick(first, second))


def _rows(change: Callable[[Tensor], Tensor], *places: int) -> Kernel:
    def kernel(*args: Tensor) -> Any:
        return experts()(*(change(a) if i in places else a for i, a in enumerate(args)))

    return kernel


def _last_lost(hidden: Tensor) -> Tensor:
    return hidden * (torch.arange(hidden.shape[-1]) < hidden.shape[-1] - 1)


MUTANTS = (
    Mutant("up_first", ("bound",), experts(halves=lambda g: _halves(g)[::-1])),
    Mutant("interleaved", ("bound",), experts(halves=lambda g: (g[..., ::2], g[..., 1::2]))),
    Mutant("no_activation", ("bound",), experts(activation=lambda g: g)),
    Mutant("gelu", ("bound",), experts(activation=torch.nn.functional.gelu)),
    Mutant("last_column_lost", ("bound",), experts(part=_last_lost)),
    Mutant("bfloat16_weights", ("bound",), experts(share=lambda w: w.bfloat16().float())),
    Mutant("weights_ignored", ("scale", "bound"), experts(share=torch.ones_like)),
    Mutant("weights_normalized", ("scale", "bound"),
           experts(share=lambda w: w / w.sum(-1, keepdim=True))),
    Mutant("weights_clipped", ("scale", "bound"), experts(share=lambda w: w.clamp(-0.5, 0.5))),
    Mutant("first_dropped", ("bound",), experts(selected=_first_dropped)),
    Mutant("next_expert", ("bound",), experts(selected=_next_expert)),
    Mutant("minus_one_is_last", ("dropped", "nobody", "bound"), experts(selected=_wrapped)),
    Mutant("no_expert_is_nearest", ("dropped", "nobody", "bound"), experts(selected=_clamped)),
    Mutant("past_last_is_last", ("dropped", "nobody"), experts(selected=_negative_only)),
    Mutant("dropped_times_zero", ("dropped",), experts(masked=False)),
    Mutant("x_added", ("nobody", "bound"),
           experts(also=lambda out, x, first, second: out + x)),
    Mutant("reads_all_down", ("unselected",), _reads(lambda first, second: second.sum())),
    Mutant("reads_all_gates", ("unselected",), _reads(lambda first, second: first.sum())),
    Mutant("reads_last_expert", ("unselected",),
           _reads(lambda first, second: second[-1:].sum())),
    Mutant("flat_ids", ("row_permutation", "bound"), experts(selected=_flat)),
    Mutant("row_before", ("row_permutation", "bound"), _rows(lambda t: t.roll(1, 0), 0)),
    Mutant("row_0_for_all", ("row_permutation", "bound"),
           _rows(lambda t: t[:1].expand(t.shape), 0)),
    Mutant("weights_of_row_before", ("row_permutation", "bound"),
           _rows(lambda t: t.roll(1, 0), 3)),
    *generic_mutants(experts()),
)  # fmt: skip
