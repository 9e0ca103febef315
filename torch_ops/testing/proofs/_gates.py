"""Proof of gated activations: ``y = act(gate) * value``, x holding the gate, then the value.

The op's contract says which activation, and whether it is rounded before the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing import draw as pieces
from torch_ops.testing._hypothesis import DrawFn, SearchStrategy
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.arithmetic import compute_dtype, contract_field, rounding
from torch_ops.testing.laws import alone, permuted_rows, rounding_bias, scaled_pair
from torch_ops.testing.layouts import LAYOUTS
from torch_ops.testing.proof import Arguments, Law, Output, Pair, Proof, Shapes, Trial
from torch_ops.testing.proofs._gate_faults import Activation, mutants, split
from torch_ops.testing.spec import Operand, Spec
from torch_ops.testing.values import FINITE_SPECIALS

REGIMES = (
    "normal", "zeros", "ones", "arange17", "grid", "sparse", "rows", "constant", "one_hot",
    "equal_rows", "alternating", "wide", "spiky", "sorted", "ties", "tiny", "small", "huge",
)  # fmt: skip
DIMS: dict[str, dict[str, int]] = {
    "one": {"tokens": 1, "half": 1},
    "odd": {"tokens": 7, "half": 385},
    "pow2": {"tokens": 8, "half": 512},
    "wide": {"tokens": 2, "half": 5125},
    "tall": {"tokens": 257, "half": 33},
    "deep": {"batch": 3, "tokens": 17, "half": 48},
    "single": {"half": 250},
}
# Tokens and width of the gate, of models' feed-forward layers.
NAMED = (
    (1, 14336), (4, 14336), (4096, 14336), (16384, 14336), (16, 1536), (7, 512), (33, 768),
    (8, 8192), (512, 8192),
)  # fmt: skip
AXES: dict[str, Sequence[Any]] = {
    "layout": LAYOUTS,
    "regime": ("normal", "rows", "zeros", "constant", "wide", "tiny", "huge", "spiky"),
    "dims": tuple(DIMS),
}
ROWS = ("outer", "batch", "tokens")


def shapes(spec: Spec) -> Shapes:
    """x has the row axes of the Spec, then gate and value side by side."""
    return {"x": (*(spec.dim[n] for n in ROWS if n in spec.dim), 2 * spec.dim["half"])}


def strategy(op: str) -> Callable[[str, int], SearchStrategy[Spec]]:
    """Strategy of Specs."""

    @st.composite
    def specs(draw: DrawFn, dtype: str, budget: int) -> Spec:
        rank = draw(st.sampled_from((2, 1, 3, 4)))
        dims: dict[str, int] = {}
        budget //= 2
        for name in ROWS[len(ROWS) - rank + 1 :]:
            dims[name] = draw(pieces.tokens(budget) if name == "tokens" else st.integers(1, 3))
            budget //= dims[name]
        dims["half"] = draw(pieces.size(budget))
        shape = (*list(dims.values())[:-1], 2 * dims["half"])
        names = FINITE_SPECIALS
        x = draw(pieces.operand(dtype, shape, REGIMES, names=names))
        return Spec.of(op, dims, {"x": x}, {}, draw(pieces.seeds()))

    return specs


def row(op: str) -> Callable[[str, Mapping[str, Any]], Spec]:
    """Maker of Specs from rows of the covering array."""

    def spec_of(dtype: str, choice: Mapping[str, Any]) -> Spec:
        dims = dict(DIMS[choice["dims"]])
        if choice["layout"] == "int64_stride":
            dims["tokens"] = 1
        ordered = {name: dims[name] for name in (*ROWS, "half") if name in dims}
        x = Operand(dtype, choice["layout"], choice["regime"])
        spec = Spec.of(op, ordered, {"x": x}, {}, seed=1)
        return pieces.fitted(spec, shapes(spec))

    return spec_of


def zero(op: str) -> Callable[[str], list[Spec]]:
    """Specs without rows, without columns, and with an empty outer axis."""

    def specs(dtype: str) -> list[Spec]:
        return [
            Spec.of(op, dims, {"x": Operand(dtype, layout)})
            for dims in (
                {"tokens": 0, "half": 8},
                {"tokens": 3, "half": 0},
                {"batch": 0, "tokens": 3, "half": 33},
            )
            for layout in ("contig", "row_stride")
        ]

    return specs


def classes(op: str) -> Callable[[str], list[Spec]]:
    """NaN and infinities in gate and value.

    A gate of -inf is left out: its limit is 0, every implementation of silu gives NaN.
    """

    def specs(dtype: str) -> list[Spec]:
        width = 33
        gate, value = 2 * width + 4, 3 * width + 4
        return [
            Spec.of(op, {"tokens": 3, "half": width}, {"x": Operand(dtype, specials=special)})
            for special in (
                ((gate, "nan"),),
                ((value, "nan"),),
                ((gate, "inf"),),
                ((value, "inf"),),
                ((value, "-inf"),),
                ((gate, "inf"), (value, "-inf")),
                ((gate, "0"), (value, "inf")),
            )
        ]

    return specs


def named(op: str) -> Callable[[str], dict[str, Spec]]:
    """Rows of models' feed-forward layers, as ``tokens x width`` of the gate."""

    def specs(dtype: str) -> dict[str, Spec]:
        return {
            f"{tokens}x{half}": Spec.of(op, {"tokens": tokens, "half": half}, {"x": Operand(dtype)})
            for tokens, half in NAMED
        }

    return specs


def _silu(g: Tensor) -> Tensor:
    return g * torch.sigmoid(g)


def _gelu_erf(g: Tensor) -> Tensor:
    """With erfc, so that nothing cancels for negative gates."""
    tail: Tensor = torch.special.erfc(-g / math.sqrt(2))
    return 0.5 * g * tail


def _gelu_tanh(g: Tensor) -> Tensor:
    """With ``(1 + tanh z) / 2 = sigmoid(2 z)``, so that nothing cancels."""
    z = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
    return g * torch.sigmoid(2 * z)


EXACT: dict[str, Activation] = {"silu": _silu, "gelu_erf": _gelu_erf, "gelu_tanh": _gelu_tanh}


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """Exact product and its bound.

    One rounding to the dtype (k = 1), or one more of the activation (k = 2, and its eta times the
    value). Before that, in units a of the compute dtype:

    * silu: ``(8 + 2|g|) a``: exp carries the error of its argument and of its reduction. Where
      exp(-g) overflows, g / (1 + exp(-g)) is 0 instead of g exp(g), and CUDA's fast division is 0
      from denominators of 2^126 on: an absolute error of at most ``2^-119`` (87.4 * 2^-126; for
      float64, where division is exact, 710 * 2^-1024).
    * gelu: ``8 a`` relative, and ``3 a |g v|`` absolute: 1 + erf and 1 + tanh cancel for g < 0.
    """
    g, v = split(args["x"].double())
    dtype = args["x"].dtype
    unit = rounding(dtype)
    activation = contract_field(contract, "activation", *EXACT)
    act = EXACT[activation](g)
    y = act * v
    k = 1 if contract_field(contract, "rounding", "once", "activation_first") == "once" else 2
    relative, absolute = torch.full_like(g, 8 * unit.acc), 3 * unit.acc * (g * v).abs()
    if activation == "silu":
        floor = 2.0**-1014 if dtype == torch.float64 else 2.0**-119
        relative, absolute = (8 + 2 * g.abs()) * unit.acc, floor * v.abs()
    under = unit.tiny * unit.acc * (1 + v.abs()) + (k - 1) * unit.eta * v.abs()
    bound = y.abs() * (k * unit.u + (k - 1) * unit.u**2 + relative) + absolute + unit.eta + under
    return (Output("out", y, bound, dtype),)


def _joined(g: Tensor, v: Tensor) -> Tensor:
    return torch.cat([g, v], dim=-1)


def _zero_value(trial: Trial) -> Sequence[Pair]:
    g, v = split(trial.args["x"])
    (got,) = trial.run(x=_joined(g, torch.zeros_like(v)))
    return [Pair("out for values of zero", got, torch.zeros_like(got))]


def _zero_gate(trial: Trial) -> Sequence[Pair]:
    g, v = split(trial.args["x"])
    (got,) = trial.run(x=_joined(torch.zeros_like(g), v))
    return [Pair("out for gates of zero", got, torch.zeros_like(got))]


def _negated_value(trial: Trial) -> Sequence[Pair]:
    g, v = split(trial.args["x"])
    (got,) = trial.run(x=_joined(g, -v))
    return [Pair("out, values negated", got, -trial.outputs[0])]


def _scaled_value(trial: Trial) -> Sequence[Pair] | None:
    g, v = split(trial.args["x"])
    info = torch.finfo(v.dtype)
    size = v[v != 0].abs()
    if size.numel() and not (size.min() >= info.tiny and size.max() <= info.max / 16):
        return None
    (got,) = trial.run(x=_joined(g, v * 8))
    return [scaled_pair("out, values times 8", got, trial.outputs[0], 3)]


def _open_gate(trial: Trial) -> Sequence[Pair]:
    """From 64 on every activation is the identity to the last bit."""
    g, v = split(trial.args["x"])
    open_gate = 64 + torch.arange(g.numel(), dtype=torch.float64).remainder(64).reshape(g.shape)
    gate = open_gate.to(g)
    (got,) = trial.run(x=_joined(gate, v))
    compute = compute_dtype(g.dtype)
    return [Pair("out of an open gate", got, (gate.to(compute) * v.to(compute)).to(g.dtype))]


LAWS = (
    Law("zero_value", "f(g, 0) == 0", _zero_value),
    Law("zero_gate", "f(0, v) == 0", _zero_gate),
    Law("negated_value", "f(g, -v) == -f(g, v)", _negated_value),
    Law("scaled_value", "f(g, 8 v) == 8 f(g, v)", _scaled_value),
    Law("open_gate", "f(g, v) == RN(g v) for g >= 64", _open_gate),
    rounding_bias(),
    permuted_rows(("x",), "rows don't know each other: f(P x) == P f(x)"),
    alone(("x",)),
)


def gate_proof(op: str, act: Activation, others: Mapping[str, Activation]) -> Proof:
    """The proof of a gated activation."""
    return Proof(
        op=op,
        arguments=("x",),
        shapes=shapes,
        draw=strategy(op),
        axes=AXES,
        row=row(op),
        zero=zero(op),
        classes=classes(op),
        named=named(op),
        oracle=oracle,
        laws=LAWS,
        mutants=mutants(act, others),
    )
