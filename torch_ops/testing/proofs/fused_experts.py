"""Proof of fused_experts: products and sums within a bound, and nothing read that nobody chose."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing import draw as pieces
from torch_ops.testing._hypothesis import DrawFn
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.arithmetic import contract_field, rounding
from torch_ops.testing.laws import homogeneous, permuted_rows
from torch_ops.testing.layouts import LAYOUTS
from torch_ops.testing.proof import Arguments, Law, Output, Pair, Proof, Shapes, Trial
from torch_ops.testing.proofs._experts_faults import MUTANTS
from torch_ops.testing.spec import Operand, Spec

OP = "fused_experts"
ARGUMENTS = ("x", "w_gate_up", "w_down", "weights", "ids")
REGIMES = ("normal", "grid", "sparse", "zeros", "alternating", "small")
SILU_SLOPE = 1.1  # the steepest that x * sigmoid(x) gets is 1.0998
DIMS: dict[str, dict[str, int]] = {
    "one": {"tokens": 1, "hidden": 1, "width": 1, "experts": 1, "k": 1},
    "few": {"tokens": 3, "hidden": 32, "width": 16, "experts": 8, "k": 2},
    "odd": {"tokens": 7, "hidden": 33, "width": 17, "experts": 5, "k": 3},
    "dense": {"tokens": 21, "hidden": 40, "width": 64, "experts": 3, "k": 3},
    "tall": {"tokens": 70, "hidden": 16, "width": 24, "experts": 2, "k": 1},
}
# tokens, hidden, width, experts, k
NAMED = (
    (1, 4096, 14336, 8, 2), (64, 4096, 14336, 8, 2), (4096, 4096, 14336, 8, 2),
    (1, 2048, 768, 128, 8), (64, 2048, 768, 128, 8), (4096, 2048, 768, 128, 8),
    (5, 64, 48, 4, 2),
)  # fmt: skip
AXES: dict[str, Sequence[Any]] = {
    "layout": LAYOUTS,
    "w": ("contig", "transposed", "row_stride", "misalign", "unbind", "step2"),
    "dims": tuple(DIMS),
    "regime": REGIMES,
    "gone": ("none", "some", "all"),
}


def shapes(spec: Spec) -> Shapes:
    """Tokens ``[T, H]``, weights of experts, weights and ids ``[T, k]``."""
    d = spec.dim
    hidden, width, experts, chosen = d["hidden"], d["width"], d["experts"], (d["tokens"], d["k"])
    return {
        "x": (d["tokens"], hidden), "w_gate_up": (experts, 2 * width, hidden),
        "w_down": (experts, hidden, width), "weights": chosen, "ids": chosen,
    }  # fmt: skip


def fill(spec: Spec, name: str, values: Tensor) -> Tensor:
    """Distinct experts a token, but for the last; matrices keep what they multiply in size."""
    if name.startswith("w_"):
        return values * 2.0 ** -math.ceil(math.log2(max(values.shape[-1], 1)) / 2)
    if name != "ids":
        return values
    d, generator = spec.dim, torch.Generator()
    generator.manual_seed(zlib.crc32(f"{spec.seed}/ids".encode()))
    order = torch.rand(d["tokens"], max(d["experts"], d["k"]), generator=generator).argsort(-1)
    ids = order[:, : d["k"]]
    if d["experts"] > 1:
        ids = torch.where(ids == d["experts"] - 1, ids - 1, ids)
    gone = torch.arange(ids.numel()).view(ids.shape) % 4 < d.get("gone", 0)
    return ids.masked_fill(gone, -1).to(values.dtype)


def _spec(dims: Mapping[str, int], looks: Mapping[str, Operand], dtype: str, seed: int = 0) -> Spec:
    plain = {name: Operand(dtype) for name in ARGUMENTS[:3]}
    rest = {"weights": Operand("float32"), "ids": Operand("int32", regime="first", high=1)}
    spec = Spec.of(OP, dims, {**plain, **rest, **looks}, {}, seed)
    return pieces.fitted(spec, shapes(spec))


@st.composite
def draw(draw: DrawFn, dtype: str, budget: int) -> Spec:
    """Specs of few experts."""
    experts = draw(st.sampled_from((4, 1, 2, 3, 8)))
    dims = {
        "tokens": draw(pieces.tokens(40)),
        "hidden": draw(pieces.size(64)),
        "width": draw(pieces.size(64)),
        "experts": experts,
        "k": draw(st.integers(1, min(experts, 4))),
        "gone": draw(st.integers(0, 4)),
    }
    shape = shapes(Spec.of(OP, dims, {}))
    looks = {name: draw(pieces.operand(dtype, shape[name], REGIMES)) for name in ARGUMENTS[:3]}
    looks["weights"] = draw(pieces.operand("float32", shape["weights"], REGIMES))
    return _spec(dims, looks, dtype, draw(pieces.seeds()))


def row(dtype: str, choice: Mapping[str, Any]) -> Spec:
    """A row of the covering array."""
    dims = dict(DIMS[choice["dims"]]) | {"gone": {"none": 0, "some": 1, "all": 4}[choice["gone"]]}
    if choice["layout"] == "int64_stride":
        dims["tokens"] = 1
    others = ("contig", "row_stride", "transposed", "misalign")
    looks = {
        "x": Operand(dtype, choice["layout"], choice["regime"]),
        "w_gate_up": Operand(dtype, choice["w"]),
        "w_down": Operand(dtype, pieces.pick(choice, "down", AXES["w"])),
        "weights": Operand("float32", pieces.pick(choice, "weights", others)),
        "ids": Operand("int32", pieces.pick(choice, "ids", others), "first", 1),
    }
    return _spec(dims, looks, dtype, 1)


def zero(dtype: str) -> list[Spec]:
    """No tokens, no elements of them, none between the products, no experts of a token."""
    return [
        _spec(DIMS["few"] | {name: 0}, {"x": Operand(dtype, layout)}, dtype)
        for name in ("tokens", "hidden", "width", "k")
        for layout in ("contig", "row_stride")
    ]


def classes(dtype: str) -> list[Spec]:
    """NaN in a token, and in weights: every element of that token is NaN."""
    return [
        _spec(DIMS["few"], {name: Operand(look, specials=((0, "nan"),))}, dtype)
        for name, look in (("x", dtype), ("weights", "float32"))
    ]


def named(dtype: str) -> dict[str, Spec]:
    """Layers of models, as ``tokens: hidden x width, k of experts``."""
    found = {}
    for tokens, hidden, width, experts, k in NAMED:
        dims = {"tokens": tokens, "hidden": hidden, "width": width, "experts": experts, "k": k}
        found[f"{tokens}: {hidden}x{width}, {k} of {experts}"] = _spec(dims, {}, dtype)
    return found


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """The exact sum and its bound.

    A product of n terms errs by ``(2 sqrt(n) + 4) a sum |x w|``. silu is no steeper than 1.1, so
    that what lies between errs by that of gate times ``1.1 |up|``, that of up times ``|silu|``,
    ``(8 + 2 |gate|) a`` of its own and a rounding to the dtype. The second product multiplies that
    error by ``|w_down|``, sums over experts add ``(k + 2) a sum |part|``.
    """
    for name, value in (("hidden", "input"), ("partial", "float32"),
                        ("invalid_id", "contributes_nothing"), ("unselected", "never_read"),
                        ("zero_weight", "runs")):  # fmt: skip
        contract_field(contract, name, value)
    x, first, second = (args[n].double() for n in ARGUMENTS[:3])
    weights, ids, unit = args["weights"].double(), args["ids"], rounding(args["x"].dtype)
    total, mass, error = (torch.zeros_like(x) for _ in range(3))
    width = second.shape[2]
    for expert in range(second.shape[0]):
        for j in range(ids.shape[1]):
            rows = (ids[:, j] == expert).nonzero().flatten()
            if not len(rows):
                continue
            both = x[rows] @ first[expert].T
            wrong = (2 * x.shape[1] ** 0.5 + 4) * unit.acc * (x[rows].abs() @ first[expert].abs().T)
            gate, up = both[:, :width], both[:, width:]
            gate_wrong, up_wrong = wrong[:, :width], wrong[:, width:]
            passed = gate * torch.sigmoid(gate)
            hidden = passed * up
            slope = SILU_SLOPE * gate_wrong
            lost = slope * (up.abs() + up_wrong) + passed.abs() * up_wrong
            lost = lost + hidden.abs() * ((8 + 2 * gate.abs()) * unit.acc + unit.u) + unit.eta
            matrix = second[expert].abs().T
            part, size = hidden @ second[expert].T, (hidden.abs() + lost) @ matrix
            lost = lost @ matrix + (2 * width**0.5 + 4) * unit.acc * size
            share = weights[rows, j, None]
            total[rows] += share * part
            mass[rows] += (share * part).abs() + share.abs() * lost
            error[rows] += share.abs() * lost
    bound = error + (ids.shape[1] + 2) * unit.acc * mass + total.abs() * unit.u + unit.eta
    return (Output("out", total, bound, args["x"].dtype),)


def _dropped(trial: Trial) -> Sequence[Pair] | None:
    """The first assignment of each token is of no expert: which number says so is nothing."""
    ids, weights = trial.args["ids"], trial.args["weights"]
    if not ids.numel():
        return None
    experts, pairs = trial.spec.dim["experts"], []
    none, other = ids.clone(), weights.clone()
    none[:, 0], other[:, 0] = -1, 0.0
    (expected,) = trial.run(ids=none, weights=other)
    for number, weight in ((-1, math.nan), (-7, 3.0), (experts, math.nan), (experts + 9, 3.0)):
        gone, share = ids.clone(), weights.clone()
        gone[:, 0], share[:, 0] = number, weight
        (got,) = trial.run(ids=gone, weights=share)
        pairs.append(Pair(f"first expert {number}, weight {weight}", got, expected))
    return pairs


def _nobody(trial: Trial) -> Sequence[Pair] | None:
    """Tokens without experts give zeros."""
    if not trial.args["ids"].numel():
        return None
    pairs = []
    for number in (-1, trial.spec.dim["experts"]):
        (got,) = trial.run(ids=torch.full_like(trial.args["ids"], number))
        pairs.append(Pair(f"experts {number}", got, torch.zeros_like(got)))
    return pairs


def _unselected(trial: Trial) -> Sequence[Pair] | None:
    """Experts that nobody chose are NaN."""
    experts = trial.spec.dim["experts"]
    chosen = torch.zeros(experts, dtype=torch.bool)
    ids = trial.args["ids"].cpu()
    chosen[ids[(ids >= 0) & (ids < experts)].long()] = True
    if bool(chosen.all()):
        return None
    gone = (~chosen).view(-1, 1, 1).to(trial.args["x"].device)
    spoilt = {n: trial.args[n].masked_fill(gone, math.nan) for n in ("w_gate_up", "w_down")}
    return [Pair("NaN in experts of nobody", trial.run(**spoilt)[0], trial.outputs[0])]


LAWS = (
    Law("dropped", "an id of no expert adds nothing, whatever its weight", _dropped),
    Law("nobody", "a token without experts gives zeros", _nobody),
    Law("unselected", "experts that nobody chose aren't read", _unselected),
    homogeneous("scale", {"weights": 3}, (3,), "f(8 weights) == 8 f(weights)"),
    permuted_rows(("x", "weights", "ids"), "tokens don't know each other", oracle),
)

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
    fill=fill,
    cost=12,
)
