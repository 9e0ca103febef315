"""Proof of top_k_renorm_probs: exactly the k largest are kept, divided by their sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.laws import alone, permuted_rows
from torch_ops.testing.proof import Arguments, Law, Mutant, Output, Pair, Proof, Trial
from torch_ops.testing.proofs import _sampling as rows
from torch_ops.testing.proofs import _sampling_faults as faults
from torch_ops.testing.proofs._sampling_faults import Seen, plain

OP = "top_k_renorm_probs"
FORM = rows.Form(OP, {"k": "int32"})


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """The first k in the order of size and index, by their sum."""
    probs, k = args["probs"], args["k"]
    chosen = rows.first(rows.positive(probs), k, None)
    active = (k > 0) & (k < probs.shape[-1])
    return (rows.renormalized(probs, chosen, active, contract),)


def _counted(trial: Trial) -> Sequence[Pair] | None:
    """Exactly k are kept; zeros aren't seen to be."""
    probs, k = trial.args["probs"], trial.args["k"].long()
    there = (rows.positive(probs) > 0).sum(-1)
    active = rows.sound(probs).squeeze(-1) & (k > 0) & (k < probs.shape[-1])
    if not bool(active.any()):
        return None
    found = (trial.outputs[0] > 0).sum(-1)
    return [Pair("kept", found[active], torch.minimum(k, there)[active])]


def _top(seen: Seen) -> Tensor:
    return (seen.number <= 0) | (seen.place < seen.number)


def _active(seen: Seen) -> Tensor:
    return (seen.number > 0) & (seen.number < seen.columns)


def _all_ties(seen: Seen) -> Tensor:
    last = seen.values.masked_fill(seen.place >= seen.number, math.inf).amin(-1, keepdim=True)
    return (seen.number <= 0) | (seen.values >= last)


def _some_ties(seen: Seen) -> Tensor:
    """Without the last if more are equal to it."""
    last = seen.values.masked_fill(seen.place >= seen.number, math.inf).amin(-1, keepdim=True)
    several = (seen.values == last).sum(-1, keepdim=True) > 1
    return _top(seen) & ~(several & (seen.values == last) & (seen.number > 1))


KERNEL = plain(_top, _active)
_window = plain(lambda s: (s.place < s.number) & (2 * s.place >= s.number), _active)
MUTANTS = (
    Mutant("renormalizes_disabled", ("identity",),
           plain(_top, lambda s: torch.full_like(s.number, 1) > 0)),
    Mutant("k_0_keeps_none", ("identity", "bound"),
           plain(lambda s: s.place < s.number, lambda s: s.number < s.columns)),
    Mutant("minus_1_alone_disables", ("identity", "bound"),
           plain(_top, lambda s: (s.number != -1) & (s.number < s.columns),
                 finish=lambda s, c: faults.divided(s, c & (s.number > 0)))),
    Mutant("tail_dropped_where_disabled", ("identity",),
           plain(_top, _active, disabled=lambda x: torch.where(x < 1e-8, 0.0, x))),
    Mutant("last_of_ties", ("largest", "bound"), plain(_top, _active, order=faults.last_first)),
    Mutant("all_ties", ("largest", "count", "bound"), plain(_all_ties, _active)),
    Mutant("one_more", ("largest", "count", "bound"),
           plain(lambda s: (s.number <= 0) | (s.place <= s.number), _active)),
    Mutant("one_less", ("largest", "count", "bound"),
           plain(lambda s: (s.number <= 0) | (s.place < s.number - 1), _active)),
    Mutant("smallest", ("largest", "bound"),
           plain(lambda s: (s.number <= 0) | (s.place >= s.columns - s.number), _active)),
    Mutant("no_ties", ("count", "bound"), plain(_some_ties, _active)),
    Mutant("over_whole_row", ("dropped", "bound"), plain(_top, _active, finish=faults.over_row)),
    Mutant("sum_of_some_others", ("dropped", "bound"),
           plain(_top, _active, finish=faults.row_rounded)),
    Mutant("one_more_in_sum", ("dropped", "bound"),
           plain(_top, _active, finish=faults.one_more_in_sum)),
    Mutant("lower_half", ("nested", "bound"), _window),
    Mutant("last_alone", ("nested", "bound"),
           plain(lambda s: (s.number <= 0) | (s.place == s.number - 1), _active)),
    Mutant("every_kth", ("nested", "bound"),
           plain(lambda s: (s.number <= 0) | ((s.place + 1) % s.number == 0), _active)),
    Mutant("small_ones_dropped", ("scale", "bound"),
           plain(_top, _active, clean=faults.small_dropped(2**-9))),
    Mutant("sum_plus_constant", ("scale", "bound"), plain(_top, _active, finish=faults.plus(1e-3))),
    Mutant("on_a_grid", ("scale", "bound"),
           plain(_top, _active, clean=lambda x: (x.nan_to_num(0, 0, 0) * 1024).round() / 1024)),
    Mutant("nan_counts_as_0", ("bound",), plain(_top, _active, unsound=0.0)),
    Mutant("sum_of_row_0", ("row_permutation", "bound"),
           plain(_top, _active, finish=faults.first_rows_sum)),
    *faults.rows_mixed(KERNEL),
)  # fmt: skip
LAWS = (
    rows.identity("k", lambda columns: (0, -1, -7, columns, columns + 5)),
    rows.largest("k", (1,)),
    Law("count", "exactly k are kept", _counted),
    rows.dropped(),
    rows.nested("k", lambda k: torch.where(k > 1, k // 2, k)),
    rows.scale({"probs": -7}, 0, "f(x / 128) == f(x)", lambda k, columns: k.clamp(1, columns - 1)),
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
