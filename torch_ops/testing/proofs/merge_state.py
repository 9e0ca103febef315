"""Proof of merge_state: two attention states over disjoint keys become one over both."""

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
from torch_ops.testing.laws import alone, homogeneous, permuted_rows, rounding_bias
from torch_ops.testing.layouts import LAYOUTS
from torch_ops.testing.proof import Arguments, Law, Output, Pair, Proof, Shapes, Trial
from torch_ops.testing.proofs._merge_faults import MUTANTS
from torch_ops.testing.spec import Operand, Spec

OP = "merge_state"
ARGUMENTS = ("v_a", "s_a", "v_b", "s_b")
V = ("normal", "rows", "grid", "zeros", "constant", "ones", "sparse", "small", "spiky", "huge")
S = ("normal", "grid", "zeros", "wide", "arange17", "ties", "sorted")
DIMS: dict[str, dict[str, int]] = {
    "one": {"tokens": 1, "heads": 1, "head_dim": 1},
    "odd": {"tokens": 7, "heads": 3, "head_dim": 40},
    "pow2": {"tokens": 8, "heads": 4, "head_dim": 64},
    "wide": {"tokens": 3, "heads": 2, "head_dim": 513},
    "tall": {"tokens": 129, "heads": 1, "head_dim": 17},
}
# tokens, heads, head_dim
NAMED = ((1, 32, 128), (16, 32, 128), (8192, 32, 128), (7, 9, 64), (8, 8, 256))
AXES: dict[str, Sequence[Any]] = {
    "layout": LAYOUTS,
    "regime": ("normal", "rows", "zeros", "constant", "grid", "spiky", "huge"),
    "s": ("normal", "grid", "zeros", "wide"),
    "dims": tuple(DIMS),
    "empty": ("none", "a", "b", "both"),
}


def shapes(spec: Spec) -> Shapes:
    """Values ``[T, H, D]`` and their LSEs ``[T, H]``."""
    d = spec.dim
    v, s = (d["tokens"], d["heads"], d["head_dim"]), (d["tokens"], d["heads"])
    return {"v_a": v, "s_a": s, "v_b": v, "s_b": s}


@st.composite
def draw(draw: DrawFn, dtype: str, budget: int) -> Spec:
    """Specs in which some parts are empty."""
    heads = draw(st.sampled_from((1, 2, 3, 4, 7)))
    tokens = draw(pieces.tokens(budget // heads))
    dims = {
        "tokens": tokens, "heads": heads,
        "head_dim": draw(pieces.size(min(budget // (heads * tokens), 513))),
    }  # fmt: skip
    shape = shapes(Spec.of(OP, dims, {}))
    finite = ("0", "-0", "1", "-1", "255")
    operands = {}
    for name in ARGUMENTS:
        if name.startswith("v"):
            operands[name] = draw(pieces.operand(dtype, shape[name], V, names=finite))
        else:
            names = ("-inf", "0", "1")
            operands[name] = draw(pieces.operand("float32", shape[name], S, names=names))
    return Spec.of(OP, dims, operands, {}, draw(pieces.seeds()))


def row(dtype: str, choice: Mapping[str, Any]) -> Spec:
    """A row of the covering array; an empty part is empty in every third row of it."""
    dims = dict(DIMS[choice["dims"]])
    if choice["layout"] == "int64_stride":
        dims["tokens"] = 1
    others = ("contig", "row_stride", "transposed", "unbind", "misalign")
    count = dims["tokens"] * dims["heads"]
    gone = tuple((i, "-inf") for i in range(0, count, 3))
    operands = {
        "v_a": Operand(dtype, choice["layout"], choice["regime"]),
        "s_a": Operand("float32", pieces.pick(choice, "s_a", others), choice["s"],
                       specials=gone if choice["empty"] in ("a", "both") else ()),
        "v_b": Operand(dtype, pieces.pick(choice, "v_b", others), "normal"),
        "s_b": Operand("float32", pieces.pick(choice, "s_b", others), "normal",
                       specials=gone if choice["empty"] in ("b", "both") else ()),
    }  # fmt: skip
    spec = Spec.of(OP, dims, operands, seed=1)
    return pieces.fitted(spec, shapes(spec))


def _plain(dtype: str) -> dict[str, Operand]:
    return {n: Operand(dtype if n.startswith("v") else "float32") for n in ARGUMENTS}


def zero(dtype: str) -> list[Spec]:
    """No tokens, no heads, no elements in a head."""
    return [
        Spec.of(OP, DIMS["odd"] | {name: 0}, operands)
        for name in ("tokens", "heads", "head_dim")
        for operands in (_plain(dtype), _plain(dtype) | {"v_a": Operand(dtype, "row_stride")})
    ]


def named(dtype: str) -> dict[str, Spec]:
    """Parts of models' attention, as ``tokens x heads x head_dim``."""
    return {
        f"{tokens}x{heads}x{head_dim}": Spec.of(
            OP, {"tokens": tokens, "heads": heads, "head_dim": head_dim}, _plain(dtype)
        )
        for tokens, heads, head_dim in NAMED
    }


def classes(dtype: str) -> list[Spec]:
    """Empty parts whose values are NaN or infinite, and such values that do count."""
    dims = {"tokens": 4, "heads": 2, "head_dim": 5}
    found = []
    for bad in ("nan", "inf", "-inf"):
        payload = Operand(dtype, specials=tuple((i, bad) for i in range(5)))
        for gone in ((), ("s_a",), ("s_a", "s_b")):
            operands = _plain(dtype) | {"v_a": payload}
            for name in gone:
                operands[name] = Operand("float32", specials=((0, "-inf"),))
            found.append(Spec.of(OP, dims, operands))
    return found


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """Exact merge and its bound.

    Weights are exp of a difference d of LSEs: they err by ``(2 + |d|) a``, and products, sums and
    division add 6 a, all relative to ``sum w |v|``: ``|v| u + sum w |v| (8 + 2 |d|) a + eta``, and
    each weight and product that underflows half the smallest subnormal number of the arithmetic.
    The exact value lies between those of the parts; float64 could leave that by rounding.
    A part with an LSE of -inf is empty: its weight is 0 and its values are not read. The new LSE
    errs by ``(4 + |s| + max|s_i|) a`` and its rounding to float32.
    """
    contract_field(contract, "empty_row", "zero_and_minus_inf")
    contract_field(contract, "lse_base", "e")
    dtype = args["v_a"].dtype
    unit = rounding(dtype)
    s = torch.stack([args["s_a"], args["s_b"]]).double()
    v = torch.stack([args["v_a"], args["v_b"]]).double()
    v = v.masked_fill((s == -math.inf).unsqueeze(-1), 0.0)
    merged = torch.logsumexp(s, 0)
    empty = merged == -math.inf
    weight = torch.exp(s - merged.masked_fill(empty, 0.0)).unsqueeze(-1)
    value = (weight * v).sum(0).maximum(v.amin(0)).minimum(v.amax(0))
    apart = (s[0] - s[1]).abs().nan_to_num(0.0, 0.0).unsqueeze(-1)
    mass = (weight * v.abs()).sum(0).minimum(v.abs().amax(0))
    under = unit.tiny * unit.acc * (2 + v.abs().nan_to_num(0.0, 0.0).sum(0))
    bound = value.abs() * unit.u + mass * (8 + 2 * apart) * unit.acc + under + unit.eta
    size = merged.abs().masked_fill(empty, 0.0)
    part = s.abs().masked_fill(s == -math.inf, 0.0).amax(0)
    u32 = torch.finfo(torch.float32).eps / 2
    s_bound = unit.acc * (4 + size + part) + u32 * size
    return Output("v", value, bound, dtype), Output("s", merged, s_bound, torch.float32)


def _both(what: str, got: Sequence[Tensor], expected: Sequence[Tensor]) -> list[Pair]:
    return [Pair(f"{n}, {what}", a, b) for n, a, b in zip(("v", "s"), got, expected, strict=True)]


def _swapped(trial: Trial) -> Sequence[Pair]:
    a = trial.args
    got = trial.run(v_a=a["v_b"], s_a=a["s_b"], v_b=a["v_a"], s_b=a["s_a"])
    return _both("parts swapped", got, trial.outputs)


def _nothing_added(trial: Trial) -> Sequence[Pair]:
    """An empty part changes nothing, from either side, whatever its values are."""
    v, s = trial.args["v_a"], trial.args["s_a"]
    expected = (torch.where((s == -math.inf).unsqueeze(-1), torch.zeros_like(v), v), s)
    none = torch.full_like(s, -math.inf)
    pairs = []
    for junk in (0.0, 7.0, math.nan):
        payload = torch.full_like(v, junk)
        after = trial.run(v_b=payload, s_b=none)
        before = trial.run(v_a=payload, s_a=none, v_b=v, s_b=s)
        pairs += _both(f"an empty part of {junk} after", after, expected)
        pairs += _both(f"an empty part of {junk} before", before, expected)
    return pairs


def _both_empty(trial: Trial) -> Sequence[Pair]:
    none = torch.full_like(trial.args["s_a"], -math.inf)
    got = trial.run(s_a=none, s_b=none)
    return _both("both parts empty", got, (torch.zeros_like(trial.args["v_a"]), none))


def _with_itself(trial: Trial) -> Sequence[Pair]:
    v, s = trial.args["v_a"], trial.args["s_a"]
    got = trial.run(v_b=v, s_b=s)
    empty = s == -math.inf
    exact = s.double() + math.log(2)
    unit = rounding(torch.float32)
    bound = unit.acc * (4 + 3 * exact.abs().masked_fill(empty, 0.0)) + unit.u
    kept = torch.where(empty.unsqueeze(-1), torch.zeros_like(v), v)
    return [
        Pair("v, merged with itself", got[0], kept),
        Pair("s, merged with itself", got[1], exact.float(), bound),
    ]


def _shifted(trial: Trial) -> Sequence[Pair] | None:
    """Only differences of LSEs count; on a grid of eighths they are exact."""
    args = trial.args
    finite = [s[s.isfinite()] for s in (args["s_a"], args["s_b"])]
    if any(bool((s.abs() > 1000).any()) for s in finite):
        return None
    grid = {n: (args[n] * 8).round() / 8 for n in ("s_a", "s_b")}
    base = trial.run(**grid)
    got = trial.run(**{n: s + 16 for n, s in grid.items()})
    return [Pair("v, both LSEs raised by 16", got[0], base[0])]


def _finite(trial: Trial) -> Sequence[Pair]:
    """A convex combination of the largest numbers, of one sign or of both, isn't larger."""
    largest = torch.finfo(trial.args["v_a"].dtype).max

    def signed(name: str) -> Tensor:
        value = trial.args[name]
        return torch.full_like(value, largest).copysign(value)

    v_a, v_b = signed("v_a"), signed("v_b")
    pairs = []
    for what, a, b in (("parts", v_a, v_b), ("equal parts", v_a, v_a), ("opposites", v_a, -v_a)):
        (got, _) = trial.run(v_a=a, v_b=b)
        pairs.append(Pair(f"finite, {what} of the largest number", got.isfinite(), a.isfinite()))
    return pairs


LAWS = (
    Law("swap", "f(a, b) == f(b, a)", _swapped),
    Law("empty_part", "f(a, empty) == a == f(empty, a), whatever the empty part holds",
        _nothing_added),
    Law("both_empty", "f(empty, empty) == (0, -inf)", _both_empty),
    Law("with_itself", "f(a, a) == (v, s + ln 2)", _with_itself),
    Law("shift", "f depends on differences of LSEs", _shifted),
    Law("finite", "finite parts give finite values, the largest too", _finite),
    homogeneous("scale", {"v_a": 3, "v_b": 3}, (3, 0), "f(8 v) == (8 v, s)"),
    rounding_bias(),
    permuted_rows(ARGUMENTS, "tokens don't know each other", oracle),
    alone(ARGUMENTS),
)  # fmt: skip


proof = Proof(
    op=OP,
    arguments=ARGUMENTS,
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
)
