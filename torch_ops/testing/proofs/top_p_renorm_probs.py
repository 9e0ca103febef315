"""Proof of top_p_renorm_probs: the fewest that reach p are kept, divided by their sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.laws import alone, permuted_rows
from torch_ops.testing.proof import Arguments, Law, Mutant, Output, Pair, Proof, Trial
from torch_ops.testing.proofs import _sampling as rows
from torch_ops.testing.proofs import _sampling_faults as faults
from torch_ops.testing.proofs._sampling_faults import Seen, plain

OP = "top_p_renorm_probs"
FORM = rows.Form(OP, {"p": "float32"})


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """The first in the order of size and index before which there is less than p, by their sum."""
    probs, p = args["probs"], args["p"]
    chosen = rows.first(rows.positive(probs), None, p)
    return (rows.renormalized(probs, chosen, p < 1, contract),)


def _reached(trial: Trial) -> Sequence[Pair] | None:
    """The mass that is kept is at least p, and less without its smallest."""
    probs, p = trial.args["probs"], trial.args["p"].double()
    values, kept = rows.positive(probs), trial.outputs[0] > 0
    mass = torch.where(kept, values, 0.0).sum(-1)
    least = values.masked_fill(~kept, torch.inf).amin(-1).nan_to_num(posinf=0.0)
    active = rows.sound(probs).squeeze(-1) & (p < 1) & (p > 0)
    if not bool(active.any()):
        return None
    enough = (mass >= p) | ((values > 0) == kept).all(-1)
    needed = mass - least < p
    return [
        Pair(what, found[active], torch.ones_like(found[active]))
        for what, found in (("mass of at least p", enough), ("the last is needed", needed))
    ]


def _top(seen: Seen) -> Tensor:
    return ~(seen.number < 1) | (seen.place == 0) | (seen.before < seen.number)


def _active(seen: Seen) -> Tensor:
    return seen.number < 1


def _without_crossing(seen: Seen) -> Tensor:
    return ~(seen.number < 1) | (seen.before + seen.values <= seen.number)


def _all_ties(seen: Seen) -> Tensor:
    last = seen.values.masked_fill(~_top(seen), torch.inf).amin(-1, keepdim=True)
    return seen.values >= last


def _relative(seen: Seen) -> Tensor:
    return (seen.place == 0) | (seen.before < seen.number * seen.values.sum(-1, keepdim=True))


def _crossing_alone(seen: Seen) -> Tensor:
    return _top(seen) & (seen.before + seen.values >= seen.number)


KERNEL = plain(_top, _active)
_upper = plain(lambda s: _top(s) & (2 * s.before >= s.number), _active)
MUTANTS = (
    Mutant("renormalizes_disabled", ("identity",),
           plain(_top, lambda s: torch.full_like(s.number, 1) > 0)),
    Mutant("p_1_counts", ("identity",), plain(_top, lambda s: s.number <= 1)),
    Mutant("tail_dropped_where_disabled", ("identity",),
           plain(_top, _active, disabled=lambda x: torch.where(x < 1e-8, 0.0, x))),
    Mutant("last_of_ties", ("largest", "bound"), plain(_top, _active, order=faults.last_first)),
    Mutant("all_ties", ("largest", "bound"), plain(_all_ties, _active)),
    Mutant("p_0_disables", ("largest", "bound"),
           plain(_top, lambda s: _active(s) & (s.number > 0))),
    Mutant("p_0_keeps_none", ("largest", "bound"), plain(lambda s: s.before < s.number, _active)),
    Mutant("without_crossing", ("largest", "mass", "bound"), plain(_without_crossing, _active)),
    Mutant("one_more", ("largest", "mass", "bound"),
           plain(lambda s: (s.place <= 1) | (s.before - s.values < s.number), _active)),
    Mutant("mass_in_bfloat16", ("mass", "bound"),
           plain(lambda s: (s.place == 0) | (s.before.bfloat16() < s.number), _active)),
    Mutant("over_whole_row", ("dropped", "bound"), plain(_top, _active, finish=faults.over_row)),
    Mutant("sum_of_some_others", ("dropped", "bound"),
           plain(_top, _active, finish=faults.row_rounded)),
    Mutant("one_more_in_sum", ("dropped", "bound"),
           plain(_top, _active, finish=faults.one_more_in_sum)),
    Mutant("upper_half", ("nested", "bound"), _upper),
    Mutant("crossing_alone", ("nested", "bound"), plain(_crossing_alone, _active)),
    Mutant("every_other", ("nested", "bound"),
           plain(lambda s: _top(s) & ((s.place + 8 * s.number).floor() % 2 == 0), _active)),
    Mutant("part_of_row", ("bound",), plain(_relative, _active)),
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
    rows.identity("p", lambda _: (1.0, 1.5, torch.inf, torch.nan)),
    rows.largest("p", (0.0, -0.5)),
    Law("mass", "what is kept reaches p, and without its last doesn't", _reached),
    rows.dropped(),
    rows.nested("p", lambda p: p / 2),
    rows.scale(
        {"probs": -7, "p": -7}, 0, "f(x / 128, p / 128) == f(x, p)", lambda p, _: p.clamp(max=0.75)
    ),
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
