"""Proof of min_p_filter: what is at least a part of the largest is kept, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.arithmetic import contract_field
from torch_ops.testing.laws import alone, permuted_rows
from torch_ops.testing.proof import Arguments, Law, Mutant, Output, Pair, Proof, Trial
from torch_ops.testing.proofs import _sampling as rows
from torch_ops.testing.proofs import _sampling_faults as faults

OP = "min_p_filter"
FORM = rows.Form(OP, {"min_p": "float32"})


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """Every bit is known: the bound is an exact product, rounded once to float32."""
    rows.agreed(contract, "nan_row", "zeros")
    contract_field(contract, "renormalized", False)
    probs, part = args["probs"], args["min_p"].double().unsqueeze(-1)
    values = rows.positive(probs)
    if not values.numel():
        return (Output("probs", values, None, torch.float32),)
    bound = (values.amax(-1, keepdim=True) * part.clamp(max=1)).float().double()
    filtered = torch.where(values >= bound, values, 0.0)
    filtered = torch.where(rows.sound(probs), filtered, math.nan)
    result = torch.where(part > 0, filtered, probs.double())
    return (Output("probs", result, None, torch.float32),)


def _equal(trial: Trial) -> Sequence[Pair] | None:
    """All that equal the largest are kept, and nothing else, bit for bit."""
    probs = trial.args["probs"]
    ready = rows.sound(probs) & (rows.positive(probs).amax(-1, keepdim=True) > 0)
    if not bool(ready.any()):
        return None
    top = torch.where(probs == probs.amax(-1, keepdim=True), probs, 0.0)
    return [
        Pair(f"min_p = {v}", torch.where(ready, trial.run(min_p=rows.like(trial, "min_p", v))[0],
             0.0), torch.where(ready, top, 0.0))
        for v in (1.0, 7.0, math.inf)
    ]  # fmt: skip


def _kept(trial: Trial) -> Sequence[Pair] | None:
    """What isn't 0 is what was given."""
    probs, (result,) = trial.args["probs"], trial.outputs
    there = (result != 0) & rows.sound(probs)
    if not bool(there.any()):
        return None
    return [Pair("what is kept", result[there], probs[there])]


def _filter(
    bound: Callable[[Tensor, Tensor], Tensor] = lambda x, part: (
        x.amax(-1, keepdim=True) * part.clamp(max=1)
    ),
    above: Callable[[Tensor, Tensor], Tensor] = torch.ge,
    active: Callable[[Tensor], Tensor] = lambda part: part > 0,
    finish: Callable[[Tensor], Tensor] = lambda x: x,
    disabled: Callable[[Tensor], Tensor] = lambda x: x,
    unsound: float = math.nan,
) -> Callable[..., Tensor]:
    """Returns a filter made of these pieces."""

    def kernel(probs: Tensor, min_p: Tensor) -> Tensor:
        probs, part = probs.contiguous(), min_p.unsqueeze(-1)
        if not probs.numel():
            return torch.empty_like(probs)
        ready = probs.isfinite()
        values = torch.where(ready & (probs > 0), probs, 0.0)
        chosen = finish(torch.where(above(values, bound(values, part)), values, 0.0))
        chosen = chosen.masked_fill(~ready.all(-1, keepdim=True), unsound)
        return torch.where(active(part), chosen, disabled(probs))

    return kernel


def _summed(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True).clamp(min=1e-30)


def _absolute(x: Tensor, part: Tensor) -> Tensor:
    return part.clamp(max=1).expand(x.shape) * (x.amax(-1, keepdim=True) > 0)


def _largest_of_all(x: Tensor, part: Tensor) -> Tensor:
    return x.max() * part.clamp(max=1)


def _every_other(x: Tensor, bound: Tensor) -> Tensor:
    odd = torch.arange(x.shape[-1]) % 2 == (bound * 64).floor() % 2
    return (x >= bound) & odd


def _near(x: Tensor, bound: Tensor) -> Tensor:
    return (x >= bound) & (x <= 4 * bound)


def _of_second(x: Tensor, part: Tensor) -> Tensor:
    return x.topk(min(2, x.shape[-1])).values[:, -1:] * part.clamp(max=1)


def _of_rest(x: Tensor, part: Tensor) -> Tensor:
    top = x.amax(-1, keepdim=True)
    return top / (1 + x.sum(-1, keepdim=True) - top) * part.clamp(max=1)


def _above_median(x: Tensor, part: Tensor) -> Tensor:
    return (x.amax(-1, keepdim=True) - x.median(-1, keepdim=True).values) * part.clamp(max=1)


KERNEL = _filter()
MUTANTS = (
    Mutant("renormalized", ("kept", "bound"), _filter(finish=_summed)),
    Mutant("on_a_grid", ("kept", "scale", "bound"),
           _filter(finish=lambda x: (x * 1024).round() / 1024)),
    Mutant("in_bfloat16", ("kept", "bound"), _filter(finish=lambda x: x.bfloat16().float())),
    Mutant("kept_is_1", ("kept", "bound"), _filter(finish=lambda x: (x > 0).float())),
    Mutant("minus_1_alone_disables", ("identity",), _filter(active=lambda part: part != -1)),
    Mutant("negatives_disable_nothing", ("identity",), _filter(active=lambda part: part.abs() > 0)),
    Mutant("tail_dropped_where_disabled", ("identity",),
           _filter(disabled=lambda x: torch.where(x < 1e-8, 0.0, x))),
    Mutant("0_is_an_eps", ("identity", "bound"),
           _filter(bound=lambda x, part: x.amax(-1, keepdim=True) * part.clamp(1e-3, 1),
                   active=lambda part: part >= 0)),
    Mutant("nothing_at_the_bound", ("equal", "bound"), _filter(above=torch.gt)),
    Mutant("past_1_none", ("equal",),
           _filter(bound=lambda x, part: x.amax(-1, keepdim=True) * part)),
    Mutant("1_disables", ("equal", "bound"), _filter(active=lambda part: (part > 0) & (part < 1))),
    Mutant("absolute", ("equal", "scale", "bound"), _filter(bound=_absolute)),
    Mutant("of_rest", ("dropped", "bound"), _filter(bound=_of_rest)),
    Mutant("above_median", ("dropped", "bound"), _filter(bound=_above_median)),
    Mutant("above_mean", ("dropped", "bound"),
           _filter(bound=lambda x, part: part * (x.amax(-1, keepdim=True) - x.mean(-1, True)))),
    Mutant("near_the_bound", ("nested", "bound"), _filter(above=_near)),
    Mutant("every_other", ("nested", "bound"), _filter(above=_every_other)),
    Mutant("below_the_bound", ("nested", "bound"), _filter(above=torch.le)),
    Mutant("sum_plus_constant", ("scale", "bound"),
           _filter(bound=lambda x, part: (x.amax(-1, keepdim=True) + 2**-6) * part.clamp(max=1))),
    Mutant("of_second", ("bound",), _filter(bound=_of_second)),
    Mutant("nan_counts_as_0", ("bound",), _filter(unsound=0.0)),
    Mutant("largest_of_all_rows", ("batch_invariance", "bound"), _filter(bound=_largest_of_all)),
    *faults.rows_mixed(KERNEL),
)  # fmt: skip
LAWS = (
    rows.identity("min_p", lambda _: (0.0, -1.0, -0.25, -math.inf, math.nan)),
    Law("equal", "min_p of 1 keeps all that equal the largest", _equal),
    Law("kept", "what is kept is what was given", _kept),
    rows.dropped(),
    rows.nested("min_p", lambda part: torch.where(part > 0, part * 2, part)),
    rows.scale({"probs": -7}, -7, "f(x / 128) == f(x) / 128"),
    permuted_rows(FORM.arguments, "rows don't know each other"),
    alone(FORM.arguments),
)

proof = Proof(
    op=OP,
    arguments=FORM.arguments,
    shapes=FORM.shapes,
    draw=FORM.draw,
    axes=FORM.axes,
    row=FORM.row,
    zero=FORM.empty,
    classes=FORM.classes,
    named=FORM.named,
    oracle=oracle,
    laws=LAWS,
    mutants=MUTANTS,
    fill=FORM.fill,
    cost=24,
)
