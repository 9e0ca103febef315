"""What the norms share: Specs, covering axes, the float64 oracles and their bounds.

Notation: ``u`` and ``eta`` are the relative and absolute error of the one rounding to the output's
dtype, ``a`` the unit of the compute dtype (float32, or float64 for float64 inputs), ``n`` the
length of a row. A sum of n rounded terms of mixed signs has relative error ``l sqrt(n) a`` with
probability close to 1 (Higham and Mary), l between 1 and 2 here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing import draw as pieces
from torch_ops.testing._hypothesis import DrawFn, SearchStrategy
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.arithmetic import contract_field, rounding
from torch_ops.testing.layouts import LAYOUTS
from torch_ops.testing.proof import Shapes
from torch_ops.testing.spec import Operand, Spec
from torch_ops.testing.values import FINITE_SPECIALS

# Each is 4^2 times the one before, so that the law of scaling stays within three values: a
# compiled backend specializes on every float it meets.
EPS = (1e-6, 1e-6 * 16, 1e-6 * 256)
ROWS = ("outer", "batch", "tokens")
REGIMES = (
    "normal", "zeros", "ones", "arange17", "grid", "sparse", "rows", "constant", "one_hot",
    "equal_rows", "alternating", "mean_shift", "spiky", "sorted", "ties", "tiny", "small", "huge",
    "enormous",
)  # fmt: skip
# A weight may be of another dtype than x; one other a dtype bounds what compiled backends compile.
OTHER = {
    "float32": "bfloat16", "float16": "float32", "bfloat16": "float32", "float64": "float32",
}  # fmt: skip
WEIGHTS = ("near_one", "ones", "normal", "grid", "zeros", "small", "constant", "spiky")
# Tokens and width of rows that models run; the last is one long row.
NAMED = (
    (1, 4096), (16, 4096), (32, 4096), (512, 4096), (4096, 4096), (16384, 8192), (65536, 1024),
    (7, 128), (16, 2048), (8, 5120), (1, 65536),
)  # fmt: skip
DIMS: dict[str, dict[str, int]] = {
    "one": {"tokens": 1, "hidden": 1},
    "odd": {"tokens": 7, "hidden": 769},
    "pow2": {"tokens": 8, "hidden": 1024},
    "wide": {"tokens": 2, "hidden": 5125},
    "tall": {"tokens": 257, "hidden": 33},
    "deep": {"batch": 3, "tokens": 17, "hidden": 96},
    "single": {"hidden": 500},
}


def shape_of(spec: Spec) -> tuple[int, ...]:
    """Shape of x: whichever row axes the Spec has, then the row."""
    return (*(spec.dim[n] for n in ROWS if n in spec.dim), spec.dim["hidden"])


def shapes(rows: Sequence[str], vectors: Sequence[str]) -> Callable[[Spec], Shapes]:
    """Shapes of tensors that look like x and of vectors as long as a row."""

    def of(spec: Spec) -> Shapes:
        full = {name: shape_of(spec) for name in rows}
        return full | dict.fromkeys(vectors, (spec.dim["hidden"],))

    return of


@st.composite
def _dims(draw: DrawFn, budget: int) -> dict[str, int]:
    rank = draw(st.sampled_from((2, 1, 3, 4)))
    dims: dict[str, int] = {}
    for name in ROWS[len(ROWS) - rank + 1 :]:
        rows = pieces.tokens(budget) if name == "tokens" else st.integers(1, 3)
        dims[name] = draw(rows)
        budget //= dims[name]
    return dims | {"hidden": draw(pieces.size(budget))}


def strategy(
    op: str, rows: Sequence[str], vectors: Mapping[str, bool], mutates: Sequence[str] = ()
) -> Callable[[str, int], SearchStrategy[Spec]]:
    """Strategy of Specs; `vectors` says of each vector whether it may be absent."""

    @st.composite
    def specs(draw: DrawFn, dtype: str, budget: int) -> Spec:
        dims = draw(_dims(budget))
        full = tuple(dims.values())
        operands = {
            name: draw(
                pieces.operand(
                    dtype, full, REGIMES, names=FINITE_SPECIALS,
                    mutated=name in mutates,
                )
            )
            for name in rows
        }  # fmt: skip
        for name, optional in vectors.items():
            if not (optional and draw(st.booleans())):
                kind = draw(st.sampled_from((dtype, OTHER[dtype])))
                operands[name] = draw(pieces.operand(kind, full[-1:], WEIGHTS))
        params = {"eps": draw(st.sampled_from(EPS))}
        return Spec.of(op, dims, operands, params, draw(pieces.seeds()))

    return specs


AXES: dict[str, Sequence[Any]] = {
    "layout": LAYOUTS,
    "regime": ("normal", "rows", "zeros", "constant", "mean_shift", "tiny", "huge", "spiky"),
    "dims": tuple(DIMS),
    "weight": ("near_one", "normal", "absent"),
    "weight_dtype": ("same", "other"),
    "eps": EPS,
}


def row(
    op: str, rows: Sequence[str], vectors: Mapping[str, bool], mutates: Sequence[str] = ()
) -> Callable[[str, Mapping[str, Any]], Spec]:
    """Maker of Specs from rows of the covering array."""
    shape_table = shapes(rows, tuple(vectors))

    def spec_of(dtype: str, choice: Mapping[str, Any]) -> Spec:
        layout = choice["layout"]
        dims = dict(DIMS[choice["dims"]])
        if layout == "int64_stride":
            dims["tokens"] = 1
        others = ("contig", "row_stride", "step2", "misalign")
        operands = {rows[0]: Operand(dtype, layout, choice["regime"])}
        for name in rows[1:]:
            regime = pieces.pick(choice, name, ("normal", choice["regime"], "rows"))
            operands[name] = Operand(dtype, pieces.pick(choice, name, others), regime)
        for index, (name, optional) in enumerate(vectors.items()):
            absent = choice["weight"] == "absent"
            drop = absent if index == 0 else pieces.pick(choice, name, (True, False))
            if not (optional and drop):
                regime = "ones" if absent else choice["weight"]
                kind = dtype if choice["weight_dtype"] == "same" else OTHER[dtype]
                operands[name] = Operand(kind, pieces.pick(choice, name, others), regime)
        ordered = {name: dims[name] for name in (*ROWS, "hidden") if name in dims}
        spec = Spec.of(op, ordered, operands, {"eps": choice["eps"]}, seed=1)
        return pieces.fitted(spec, shape_table(spec), mutates)

    return spec_of


def zero(op: str, rows: Sequence[str], vectors: Sequence[str]) -> Callable[[str], list[Spec]]:
    """Specs without rows, with rows of no elements, and with an empty outer axis."""

    def specs(dtype: str) -> list[Spec]:
        operands = {name: Operand(dtype) for name in (*rows, *vectors)}
        strided = operands | {rows[0]: Operand(dtype, "row_stride")}
        return [
            Spec.of(op, dims, look, {"eps": EPS[0]})
            for dims in (
                {"tokens": 0, "hidden": 8},
                {"tokens": 3, "hidden": 0},
                {"batch": 0, "tokens": 3, "hidden": 33},
            )
            for look in (operands, strided)
        ]

    return specs


def classes(op: str, rows: Sequence[str], vectors: Sequence[str]) -> Callable[[str], list[Spec]]:
    """Specs with NaN and infinities in single rows of each tensor."""

    def specs(dtype: str) -> list[Spec]:
        found = []
        for name in rows:
            for special in (("nan",), ("inf",), ("-inf",), ("inf", "-inf"), ("inf", "nan")):
                operands = {n: Operand(dtype) for n in (*rows, *vectors)}
                places = tuple((33 + 5 * i, s) for i, s in enumerate(special))
                operands[name] = Operand(dtype, specials=places)
                dims = {"tokens": 4, "hidden": 33}
                found.append(Spec.of(op, dims, operands, {"eps": EPS[0]}))
        return found

    return specs


def named(
    op: str, rows: Sequence[str], vectors: Sequence[str], mutates: Sequence[str] = ()
) -> Callable[[str], dict[str, Spec]]:
    """Rows of models, as ``tokens x width``; vectors of float32; the heads of a fused QKV."""

    def specs(dtype: str) -> dict[str, Spec]:
        found = {}

        def add(name: str, dims: Mapping[str, int], layout: str, vector: str) -> None:
            operands = {n: Operand(dtype, layout) for n in rows}
            operands |= {n: Operand(vector, regime="near_one") for n in vectors}
            spec = Spec.of(op, dims, operands, {"eps": EPS[0]})
            found[name] = pieces.fitted(spec, shapes(rows, vectors)(spec), mutates)

        for tokens, hidden in NAMED:
            add(f"{tokens}x{hidden}", {"tokens": tokens, "hidden": hidden}, "contig", dtype)
        if dtype != "float32":
            for tokens in (1, 16, 32, 4096):
                dims = {"tokens": tokens, "hidden": 4096}
                add(f"{tokens}x4096, float32 vectors", dims, "contig", "float32")
        add("7x8x128 of QKV", {"batch": 7, "tokens": 8, "hidden": 128}, "row_stride", dtype)
        return found

    return specs


def rms_bound(x: Tensor, r: Tensor, gain: Tensor, weight_mul: str, dtype: torch.dtype) -> Tensor:
    """Bound of ``y = x r g``, r the inverse root of ``mean(x^2) + eps``.

    The mean has relative error ``(l sqrt(n) + 2) a`` (squares, sum, division); its root halves
    that; eps rounded, sum, root and two products add at most 4 more: ``(2 sqrt(n) + 6) a``.
    Policies differ in the last steps:

    * ``fp32_all``: one rounding of the product: ``|y| (u + (2 sqrt(n) + 6) a) + eta``.
    * ``one_plus_weight_fp32``: the same with g = 1 + w, whose rounding adds ``2 a |x r|``.
    * ``cast_then_mul``: x r is rounded, then the product: ``|y| (2 u + u^2 + ...)``, and the
      first absolute error is multiplied by g.

    A product that underflows in the compute dtype costs half its smallest subnormal, times g.
    """
    unit = rounding(dtype)
    y = (x * r * gain).abs()
    bound: Tensor = y * (unit.u + (2 * x.shape[-1] ** 0.5 + 6) * unit.acc)
    bound = bound + unit.eta + unit.tiny * unit.acc * (1 + gain.abs())
    if weight_mul == "one_plus_weight_fp32":
        bound = bound + 2 * unit.acc * (x * r).abs()
    if weight_mul == "cast_then_mul":
        bound = bound + y * (unit.u + unit.u**2) + 2 * unit.eta * gain.abs().clamp(min=1)
    return bound


def rms_oracle(
    x: Tensor, weight: Tensor | None, eps: float, weight_mul: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Exact root mean square norm of the last axis of exact values, and its bound for a dtype."""
    exact = x.double()
    gain = torch.ones((), dtype=torch.float64) if weight is None else weight.double()
    if weight_mul == "one_plus_weight_fp32":
        gain = 1 + gain
    r = (exact.square().mean(-1, keepdim=True) + eps).rsqrt()
    return exact * r * gain, rms_bound(exact, r, gain, weight_mul, dtype)


def weight_policy(contract: Any) -> str:
    """The contract's `weight_mul`, one of those that `rms_bound` is derived for."""
    return contract_field(
        contract, "weight_mul", "fp32_all", "cast_then_mul", "one_plus_weight_fp32"
    )


def layer_oracle(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Exact layer norm of the last axis, and its bound.

    The mean errs by ``m = (sqrt(n) + 4) a mean|x|``. It shifts every difference x - mu, which is
    itself rounded twice, and it raises the variance by m^2, a relative ``(r m)^2`` of variance
    plus eps. The variance adds ``(sqrt(n) + 8) a`` as in `rms_bound`. So x_hat errs by
    ``h = r (m + 2 a |x - mu|) + |x_hat| ((sqrt(n) + 8) a + (r m)^2)`` and y = x_hat w + b by
    ``|w| h + 2 a |b| + |y| u + eta``. The terms contain mean|x| and not only |y|: where the mean
    dwarfs the spread, a correct kernel loses digits that no relative tolerance would grant.
    """
    unit = rounding(x.dtype)
    exact = x.double()
    gain = torch.ones((), dtype=torch.float64) if weight is None else weight.double()
    offset = torch.zeros((), dtype=torch.float64) if bias is None else bias.double()
    root = x.shape[-1] ** 0.5
    mu = exact.mean(-1, keepdim=True)
    centered = exact - mu
    r = (centered.square().mean(-1, keepdim=True) + eps).rsqrt()
    x_hat = centered * r
    y = x_hat * gain + offset
    m = (root + 4) * unit.acc * exact.abs().mean(-1, keepdim=True)
    spread = (root + 8) * unit.acc + (r * m).square()
    h = r * (m + 2 * unit.acc * centered.abs()) + x_hat.abs() * spread
    under = unit.tiny * unit.acc * (1 + gain.abs())
    bound = gain.abs() * h + 2 * unit.acc * offset.abs() + y.abs() * unit.u + unit.eta + under
    return y, bound
