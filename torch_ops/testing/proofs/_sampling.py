"""What proofs of ops on rows of probabilities share: examples, the order of a row, laws."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing import draw as pieces
from torch_ops.testing._hypothesis import DrawFn, SearchStrategy
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.arithmetic import contract_field, rounding
from torch_ops.testing.laws import in_range, scaled, scaled_pair
from torch_ops.testing.layouts import LAYOUTS
from torch_ops.testing.proof import Law, Output, Pair, Shapes, Trial
from torch_ops.testing.spec import Operand, Spec

LOGITS = ("normal", "wide", "sorted", "spiky")  # their softmax is taken
WEIGHTS = ("ties", "one_hot", "zeros", "ones", "arange17", "sparse", "tiny")  # of their sum
REGIMES = (*LOGITS, *WEIGHTS)
COVERED = ("normal", "wide", "sorted", "ties", "one_hot", "zeros", "arange17")
DIMS: dict[str, dict[str, int]] = {
    "one": {"rows": 1, "columns": 1},
    "odd": {"rows": 7, "columns": 33},
    "pow2": {"rows": 8, "columns": 64},
    "wide": {"rows": 2, "columns": 5125},
    "tall": {"rows": 33, "columns": 5},
}
NAMED = ((1, 128256), (2, 32000), (8, 128256), (64, 151936), (128, 128256), (256, 32000))
INTEGERS = ("index", "counting", "first")
FLOATING = ("normal", "zeros", "ones", "small", "near_one")


@dataclass(frozen=True)
class Form:
    """An op that takes probs and numbers of rows.

    Attributes:
        op: Its name.
        numbers: Dtype of each of the other arguments, by name.
    """

    op: str
    numbers: Mapping[str, str]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments."""
        return ("probs", *self.numbers)

    @property
    def axes(self) -> dict[str, Sequence[Any]]:
        """Axes of the covering array."""
        numbers = {n: INTEGERS if d.startswith("int") else FLOATING for n, d in self._main()}
        axes = {"layout": LAYOUTS, "regime": COVERED, "dims": tuple(DIMS)}
        return {**axes, "held": ((), ((2, "nan"),)), **numbers}

    def _main(self) -> list[tuple[str, str]]:
        return [(n, d) for n, d in self.numbers.items() if n not in ("seed", "offset")]

    def shapes(self, spec: Spec) -> Shapes:
        """Probs ``[B, V]``, a number a row."""
        rows, columns = spec.dim["rows"], spec.dim["columns"]
        return {"probs": (rows, columns), **dict.fromkeys(self.numbers, (rows,))}

    def spec(self, dims: Mapping[str, int], looks: Mapping[str, Operand], seed: int = 0) -> Spec:
        """An example, plain where nothing else is said."""
        high = {"k": min(dims["columns"], 60) + 3, "seed": 2**62, "offset": 2**62}
        plain = {"probs": Operand("float32")}
        for name, dtype in self.numbers.items():
            regime = "index" if dtype.startswith("int") else "normal"
            plain[name] = Operand(dtype, regime=regime, high=high.get(name, 0))
        merged = {n: looks.get(n, look) for n, look in plain.items()}
        return pieces.fitted(spec := Spec.of(self.op, dims, merged, seed=seed), self.shapes(spec))

    def look(self, name: str, dims: Mapping[str, int], **changes: Any) -> Operand:
        """A number's operand."""
        plain = self.spec(dims, {}).operand[name]
        kept = {"dtype": plain.dtype, "regime": plain.regime, "high": plain.high}
        return Operand(**{**kept, **changes})

    def draw(self, dtype: str, budget: int) -> SearchStrategy[Spec]:
        """Examples within a budget of elements."""
        return _drawn(self, dtype, budget)

    def row(self, dtype: str, choice: Mapping[str, Any]) -> Spec:
        """A row of the covering array."""
        dims = dict(DIMS[choice["dims"]])
        if choice["layout"] == "int64_stride":
            dims["rows"] = 1
        looks = {"probs": Operand(dtype, choice["layout"], choice["regime"], 0, choice["held"])}
        for name in self.numbers:
            layout = pieces.pick(choice, name, ("contig", "step2", "misalign", "expand0"))
            regime = choice.get(name, "index")
            looks[name] = self.look(name, dims, layout=layout, regime=regime)
        return self.spec(dims, looks, seed=1)

    def zero(self, dtype: str) -> list[Spec]:
        """No rows."""
        return [
            self.spec({"rows": 0, "columns": n}, {"probs": Operand(dtype, layout)})
            for n in (1, 33)
            for layout in ("contig", "row_stride")
        ]

    def empty(self, dtype: str) -> list[Spec]:
        """No rows, or rows without columns."""
        none = {"rows": 3, "columns": 0}
        return [*self.zero(dtype), self.spec(none, {}), self.spec({"rows": 0, "columns": 0}, {})]

    def classes(self, dtype: str) -> list[Spec]:
        """NaN and infinities in some rows."""
        dims = {"rows": 5, "columns": 6}
        return [
            self.spec(dims, {"probs": Operand(dtype, specials=((3, special), (20, special)))}, s)
            for special in ("nan", "inf", "-inf")
            for s in range(3)
        ]

    def named(self, dtype: str) -> dict[str, Spec]:
        """Batches over vocabularies of models."""
        return {
            f"{rows}x{columns}": self.spec({"rows": rows, "columns": columns}, {})
            for rows, columns in NAMED
        }

    def fill(self, spec: Spec, name: str, values: Tensor) -> Tensor:
        """Probabilities of logits or weights; numbers around what they are compared with.

        Sorted ones add up to 3/4: rows needn't to 1.
        """
        if name in ("seed", "offset"):
            return values
        if name == "k":
            return values - 1
        if name != "probs":
            return values.abs()
        if not values.numel():
            return values
        finite = values.isfinite()
        wide = torch.where(finite, values.double(), 0.0)
        if spec.operand[name].regime in LOGITS:
            wide = wide.softmax(-1) * (0.75 if spec.operand[name].regime == "sorted" else 1)
        else:
            wide = wide.abs()
            wide = wide / wide.sum(-1, keepdim=True).clamp(min=1e-300)
        return torch.where(finite, wide.float(), values)


@st.composite
def _drawn(draw: DrawFn, form: Form, dtype: str, budget: int) -> Spec:
    rows = draw(pieces.tokens(budget))
    dims = {"rows": rows, "columns": draw(pieces.size(max(budget // rows, 1)))}
    shape = form.shapes(Spec.of(form.op, dims, {}))
    look = pieces.operand(dtype, shape["probs"], REGIMES, names=("0", "nan", "inf"))
    looks = {"probs": draw(look)}
    for name, kind in form.numbers.items():
        options = INTEGERS if kind.startswith("int") else FLOATING
        high = form.look(name, dims).high
        names = () if kind.startswith("int") else ("0", "1", "-1", "tiny")
        look = pieces.operand(kind, (rows,), options, names=names, high=high)
        looks[name] = draw(look)
    return form.spec(dims, looks, draw(pieces.seeds()))


def positive(probs: Tensor) -> Tensor:
    """The probabilities in float64, 0 in place of what isn't one."""
    wide = probs.double()
    return torch.where(wide.isfinite() & (wide > 0), wide, 0.0)


def sound(probs: Tensor) -> Tensor:
    """Which rows hold finite numbers alone: ``[B, 1]``."""
    return probs.isfinite().all(-1, keepdim=True)


def places(values: Tensor) -> Tensor:
    """Each element's place in its row, from the largest on, of equal ones the first first."""
    order = (-values).sort(dim=-1, stable=True).indices
    count = torch.arange(values.shape[-1], device=values.device).expand(values.shape)
    return torch.empty_like(order).scatter_(-1, order, count)


def mass_before(values: Tensor, place: Tensor) -> Tensor:
    """The sum of what comes before an element in that order."""
    ordered = torch.empty_like(values).scatter_(-1, place, values)
    before = ordered.cumsum(-1) - ordered
    return before.gather(-1, place)


def first(values: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """What the definitions of top-k and top-p keep; all where a number disables its filter."""
    place = places(values)
    chosen = torch.ones_like(values, dtype=torch.bool)
    if k is not None:
        chosen &= (k.unsqueeze(-1) <= 0) | (place < k.unsqueeze(-1))
    if p is not None:
        limit = p.double().unsqueeze(-1)
        chosen &= ~(limit < 1) | (place == 0) | (mass_before(values, place) < limit)
    return chosen


def renormalized(probs: Tensor, chosen: Tensor, active: Tensor, contract: Any) -> Output:
    """What is chosen by its sum, and the bound of that.

    A sum of n positive numbers in any order of additions errs by less than ``(2 sqrt(n) + 2) a``
    of itself; its rounding, division and a scale add 4 a.
    """
    agreed(contract, "nan_row", "zeros")
    values = torch.where(chosen, positive(probs), 0.0)
    total = values.sum(-1, keepdim=True)
    result = values / torch.where(total > 0, total, 1.0)
    unit = rounding(torch.float32)
    count = (values > 0).sum(-1, keepdim=True).double()
    bound = result * (2 * count.sqrt() + 6) * unit.u + unit.eta * (result > 0)
    result = torch.where(sound(probs), result, math.nan)
    active = active.unsqueeze(-1)
    return Output(
        "probs", torch.where(active, result, probs.double()),
        torch.where(active, bound, 0.0), torch.float32,
    )  # fmt: skip


def agreed(contract: Any, not_finite: str, no_mass: str) -> None:
    """Refuses a contract for which there is no oracle."""
    contract_field(contract, "ties", "lowest_index_first")
    contract_field(contract, "mass", "exact_and_original")
    contract_field(contract, "not_finite", not_finite)
    contract_field(contract, "no_mass", no_mass)


def like(trial: Trial, name: str, value: float) -> Tensor:
    """The number of every row."""
    return torch.full_like(trial.args[name], value)


def identity(name: str, values: Callable[[int], Sequence[float]]) -> Law:
    """Numbers that disable a filter leave every bit as it is.

    Args:
        name: The argument.
        values: Its disabling values, by the number of columns.
    """

    def pairs(trial: Trial) -> Sequence[Pair]:
        probs = trial.args["probs"]
        return [
            Pair(f"{name} = {v}", trial.run(**{name: like(trial, name, v)})[0], probs)
            for v in values(probs.shape[-1])
        ]

    return Law("identity", f"f(x, disabling {name}) == x", pairs)


def largest(name: str, values: Sequence[float]) -> Law:
    """The strictest filter leaves all of the mass where the largest is for the first time."""

    def pairs(trial: Trial) -> Sequence[Pair] | None:
        probs = trial.args["probs"]
        there = positive(probs)
        ready = sound(probs) & (there.amax(-1, keepdim=True) > 0)
        if probs.shape[-1] < 2 or not bool(ready.any()):
            return None
        found = []
        for value in values:
            (got,) = trial.run(**{name: like(trial, name, value)})
            alone = (places(there) == 0) * ready.float()
            found.append(Pair(f"{name} = {value}", torch.where(ready, got, 0.0), alone))
        return found

    return Law("largest", f"the strictest {name} leaves 1 where the largest is first", pairs)


def dropped() -> Law:
    """What a filter drops is nothing to what it keeps."""

    def pairs(trial: Trial) -> Sequence[Pair] | None:
        probs, (result,) = trial.args["probs"], trial.outputs
        if not bool((probs.masked_fill(result != 0, 0) != 0).any()):
            return None
        (got,) = trial.run(probs=probs.masked_fill(result == 0, 0.0))
        return [Pair("what is dropped is 0", got, result)]

    return Law("dropped", "f(x) == f(x without what f drops)", pairs)


def nested(name: str, smaller: Callable[[Tensor], Tensor]) -> Law:
    """A stricter filter keeps nothing that another drops."""

    def pairs(trial: Trial) -> Sequence[Pair] | None:
        ready = sound(trial.args["probs"])
        (got,) = trial.run(**{name: smaller(trial.args[name])})
        (base,) = trial.outputs
        beside = (got != 0) & (base == 0) & ready
        return [Pair(f"kept by a stricter {name} alone", beside, torch.zeros_like(beside))]

    return Law("nested", f"a stricter {name} keeps a part of what another keeps", pairs)


def scale(
    changes: Mapping[str, int],
    power: int,
    statement: str,
    enabled: Callable[[Tensor, int], Tensor] = lambda number, columns: number,
) -> Law:
    """Scaled by powers of two, the result is scaled likewise, bit for bit.

    Args:
        changes: Exponents by argument.
        power: The exponent of the result.
        statement: The law.
        enabled: A number that doesn't disable the filter, by one and the number of columns.
    """

    def pairs(trial: Trial) -> Sequence[Pair] | None:
        args = dict(trial.args)
        for name in [n for n in args if n in ("k", "p")]:
            args[name] = enabled(args[name], args["probs"].shape[-1])
        ready = all(in_range(args[n], -100, 20) for n in changes)
        if not ready or args["probs"].shape[-1] < 2:
            return None
        (base,) = trial.run(**args)
        (got,) = trial.run(**args | {n: scaled(args[n], changes[n]) for n in changes})
        return [scaled_pair(f"{', '.join(changes)} scaled", got, base, power)]

    return Law("scale", statement, pairs)
