"""Proof of topk_softmax: which experts are known exactly, their weights within a bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing import draw as pieces
from torch_ops.testing._hypothesis import DrawFn
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.arithmetic import contract_field, rounding
from torch_ops.testing.laws import alone, permuted_rows
from torch_ops.testing.layouts import LAYOUTS
from torch_ops.testing.proof import Arguments, Law, Output, Pair, Proof, Shapes, Trial
from torch_ops.testing.proofs._routing_faults import MUTANTS
from torch_ops.testing.spec import Operand, Spec

OP = "topk_softmax"
REGIMES = ("normal", "ties", "grid", "constant", "spiky", "wide", "huge", "sorted", "one_hot")
NAMES = ("nan", "0", "-0", "-inf", "255", "inf")
DIMS: dict[str, dict[str, int]] = {
    "one": {"tokens": 1, "experts": 1},
    "few": {"tokens": 7, "experts": 8},
    "odd": {"tokens": 5, "experts": 60},
    "pow2": {"tokens": 9, "experts": 128},
    "many": {"tokens": 3, "experts": 513},
    "tall": {"tokens": 257, "experts": 3},
}
# tokens, experts, k
NAMED = (
    (1, 8, 2), (128, 8, 2), (8192, 8, 2), (1, 128, 8), (128, 128, 8), (8192, 128, 8),
    (128, 256, 8), (128, 512, 10), (7, 60, 4),
)  # fmt: skip
AXES: dict[str, Sequence[Any]] = {
    "layout": LAYOUTS,
    "regime": REGIMES,
    "dims": tuple(DIMS),
    "k": ("one", "some", "all"),
    "renormalize": (False, True),
}


def shapes(spec: Spec) -> Shapes:
    """Logits ``[T, E]``."""
    return {"logits": (spec.dim["tokens"], spec.dim["experts"])}


def _spec(dims: Mapping[str, int], look: Operand, k: int, renormalize: bool, seed: int = 0) -> Spec:
    params = {"k": k, "renormalize": renormalize}
    spec = Spec.of(OP, dims, {"logits": look}, params, seed)
    return pieces.fitted(spec, shapes(spec))


@st.composite
def draw(draw: DrawFn, dtype: str, budget: int) -> Spec:
    """Specs of any number of experts, with NaN and infinities."""
    experts = draw(pieces.size(min(budget, 600)))
    dims = {"tokens": draw(pieces.tokens(min(budget // experts, 300))), "experts": experts}
    shape = shapes(Spec.of(OP, dims, {}))["logits"]
    look = draw(pieces.operand(dtype, shape, REGIMES, names=NAMES))
    k = draw(pieces.size(min(experts, 12)))
    return _spec(dims, look, k, draw(st.booleans()), draw(pieces.seeds()))


def row(dtype: str, choice: Mapping[str, Any]) -> Spec:
    """A row of the covering array."""
    dims = dict(DIMS[choice["dims"]])
    if choice["layout"] == "int64_stride":
        dims["tokens"] = 1
    experts = dims["experts"]
    k = {"one": 1, "some": min(experts, 8), "all": min(experts, 64)}[choice["k"]]
    look = Operand(dtype, choice["layout"], choice["regime"])
    return _spec(dims, look, k, choice["renormalize"], seed=1)


def zero(dtype: str) -> list[Spec]:
    """No tokens."""
    return [
        _spec({"tokens": 0, "experts": 8}, Operand(dtype, layout), k, renormalize=k == 2)
        for layout in ("contig", "row_stride")
        for k in (1, 2)
    ]


def classes(dtype: str) -> list[Spec]:
    """Rows with NaN and infinities, of nothing but them, and beside rows of numbers."""
    found = []
    for name in ("nan", "inf", "-inf"):
        for count in (1, 4, 5):
            look = Operand(dtype, specials=tuple((i, name) for i in range(count)))
            found.append(_spec({"tokens": 3, "experts": 5}, look, 2, renormalize=count == 4))
    return found


def named(dtype: str) -> dict[str, Spec]:
    """Routers of models, as ``tokens x experts, k``."""
    return {
        f"{tokens}x{experts}, {k}": _spec(
            {"tokens": tokens, "experts": experts}, Operand(dtype), k, renormalize=True
        )
        for tokens, experts, k in NAMED
    }


def ranking(logits: Tensor, k: int) -> Tensor:
    """The ids of the k largest logits: NaN last, and of equal ones the lowest first."""
    ranked = logits.masked_fill(logits.isnan(), -math.inf)
    return torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :k]


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """The ids, and exact weights with their bound.

    The exponential of a difference d errs by ``(3 + 2 |d|) a``, the sum of E of them by as much on
    average and ``2 sqrt(E) a``, the quotient by ``2 a``; renormalized weights are quotients of
    such. What underflows loses at most the smallest normal number, divided by the sum.
    """
    contract_field(contract, "ranked_by", "logit")
    contract_field(contract, "ties", "lowest_expert")
    contract_field(contract, "nan_logit", "ranks_last")
    contract_field(contract, "no_softmax", "nan")
    logits, k = args["logits"].double(), args["k"]
    unit, single = rounding(args["logits"].dtype), torch.finfo(torch.float32)
    ids = ranking(logits, k)
    share = torch.softmax(logits, -1)
    apart = (logits - logits.amax(-1, keepdim=True)).abs().nan_to_num(0.0, 0.0)
    mean = (share.nan_to_num(0.0) * apart).sum(-1, keepdim=True)
    relative = (8 + 2 * logits.shape[1] ** 0.5 + 2 * mean + 2 * apart.gather(-1, ids)) * unit.acc
    weights, lost = share.gather(-1, ids), torch.tensor(single.tiny, dtype=torch.float64)
    if args["renormalize"]:
        some = weights.sum(-1, keepdim=True)
        weights = weights / some
        relative = relative + (weights * relative).sum(-1, keepdim=True) + (2 + k) * unit.acc
        lost = lost * (1 + k) / some
    bound = weights * (relative + single.eps / 2) + lost
    int_ids = Output("ids", ids.double(), None, torch.int32)
    return Output("weights", weights, bound, torch.float32), int_ids


def _both(what: str, got: Sequence[Tensor], expected: Sequence[Tensor]) -> list[Pair]:
    names = ("weights", "ids")
    return [Pair(f"{n}, {what}", a, b) for n, a, b in zip(names, got, expected, strict=True)]


def _ranked(trial: Trial) -> Sequence[Pair]:
    """The chosen logits are those that sorting finds: nothing larger is left."""
    logits, k = trial.args["logits"], trial.args["k"]
    ranked = logits.masked_fill(logits.isnan(), -math.inf)
    found = ranked.gather(-1, trial.outputs[1].long().clamp(0, logits.shape[1] - 1))
    return [Pair("chosen logits", found, ranked.sort(-1, descending=True).values[:, :k])]


def _distinct(trial: Trial) -> Sequence[Pair]:
    """Of NaN alone, of equal logits, and of those that are given."""
    logits = trial.args["logits"]
    spoilt = logits.clone()
    spoilt[:, ::2] = math.nan
    none, some = trial.run(logits=torch.full_like(logits, math.nan)), trial.run(logits=spoilt)
    flat = trial.run(logits=torch.zeros_like(logits))
    pairs = []
    for what, ids in (("given", trial.outputs[1]), ("NaN", none[1]), ("half NaN", some[1]),
                      ("zeros", flat[1])):  # fmt: skip
        ordered = ids.sort(-1).values
        fine = (ordered[:, 1:] > ordered[:, :-1]).all(-1) & (ids >= 0).all(-1)
        fine &= (ids < logits.shape[1]).all(-1)
        pairs.append(Pair(f"distinct experts, logits {what}", fine, torch.ones_like(fine)))
    return [*pairs, Pair("weights of NaN", none[0], torch.full_like(none[0], math.nan))]


def _ties(trial: Trial) -> Sequence[Pair]:
    """Of equal logits, zeros of both signs too, the first experts are chosen."""
    logits, k = trial.args["logits"], trial.args["k"]
    first = torch.arange(k, dtype=torch.int32, device=logits.device).expand(len(logits), k)
    zeros = torch.zeros_like(logits).copysign(logits)
    pairs = []
    for what, equal in (("zeros", zeros), ("NaN", torch.full_like(logits, math.nan))):
        pairs.append(Pair(f"ids of equal logits, {what}", trial.run(logits=equal)[1], first))
    return pairs


def _fewer(trial: Trial) -> Sequence[Pair] | None:
    k = trial.args["k"]
    if k == 1:
        return None
    whole = trial.run(renormalize=False)
    fewer = trial.run(k=k - 1, renormalize=False)
    return _both("one expert less", fewer, [part[:, :-1] for part in whole])


def _shifted(trial: Trial) -> Sequence[Pair]:
    """On a grid of quarters up to 4 every sum is exact, in every dtype."""
    grid = (trial.args["logits"].nan_to_num(0.0).clamp(-4, 4) * 4).round() / 4
    return _both("raised by 4", trial.run(logits=grid + 4), trial.run(logits=grid))


def _renormalized(trial: Trial) -> Sequence[Pair]:
    plain, ids = trial.run(renormalize=False)
    got = trial.run(renormalize=True)
    some = plain.double().sum(-1, keepdim=True)
    exact = plain.double() / some
    k, single = plain.shape[1], torch.finfo(torch.float32)
    bound = (4 + k) * single.eps * exact + (1 + k) * single.tiny / some
    return [
        Pair("weights by their sum", got[0].double(), exact, bound),
        Pair("ids", got[1], ids),
    ]


LAWS = (
    Law("ranked", "logits[ids] are the largest, in descending order", _ranked),
    Law("distinct", "ids of a row are distinct experts, whatever the logits", _distinct),
    Law("ties", "of equal logits the lowest experts are chosen", _ties),
    Law("fewer", "f(x, k)[:, :k - 1] == f(x, k - 1)", _fewer),
    Law("shift", "f(x + c) == f(x)", _shifted),
    Law("renormalized", "f(x, renormalize) == w / sum(w)", _renormalized),
    permuted_rows(("logits",), "tokens don't know each other", oracle),
    alone(("logits",)),
)

proof = Proof(
    op=OP,
    arguments=("logits", "k", "renormalize"),
    shapes=shapes,
    draw=draw,
    axes=AXES,
    row=row,
    zero=zero,
    classes=classes,
    named=named,
    oracle=oracle,
    laws=LAWS,
    mutants=MUTANTS,
    cost=8,
)
