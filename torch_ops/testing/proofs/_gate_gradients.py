"""Proof of the gradients of gated activations: of the gate, then of the value, side by side.

With ``y = act(g) v``: ``dg = grad v act'(g)`` and ``dv = grad act(g)``.
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
from torch_ops.testing.batch_faults import batch_mutants
from torch_ops.testing.faults import floored, generic_mutants, raised, truncated
from torch_ops.testing.laws import alone, negated, permuted_rows, rounding_bias, scaled_pair
from torch_ops.testing.proof import Arguments, Law, Mutant, Output, Pair, Proof, Shapes, Trial
from torch_ops.testing.proofs import _gates
from torch_ops.testing.proofs._gate_faults import split
from torch_ops.testing.spec import Operand, Spec

Slopes = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
GRADS = ("normal", "ones", "grid", "sparse", "rows", "small")


def shapes(spec: Spec) -> Shapes:
    """x is that of the gate; grad has the rows of x and half of its columns."""
    full = _gates.shapes(spec)["x"]
    return {"x": full, "grad": (*full[:-1], full[-1] // 2)}


def strategy(op: str) -> Callable[[str, int], SearchStrategy[Spec]]:
    """Strategy of Specs: those of the gate, with a gradient."""
    gate = _gates.strategy(op)

    @st.composite
    def specs(draw: DrawFn, dtype: str, budget: int) -> Spec:
        spec = draw(gate(dtype, budget))
        grad = draw(pieces.operand(dtype, shapes(spec)["grad"], GRADS))
        return spec.replace(operands={**spec.operand, "grad": grad})

    return specs


def row(op: str) -> Callable[[str, Mapping[str, Any]], Spec]:
    """Maker of Specs from rows of the covering array."""
    gate = _gates.row(op)

    def spec_of(dtype: str, choice: Mapping[str, Any]) -> Spec:
        spec = gate(dtype, choice)
        layout = pieces.pick(choice, "grad", ("contig", "row_stride", "step2", "misalign"))
        others = ("normal",) if choice["regime"] == "normal" else ("ones", "rows", "normal")
        grad = Operand(dtype, layout, pieces.pick(choice, "regime", others))
        spec = spec.replace(operands={**spec.operand, "grad": grad})
        return pieces.fitted(spec, shapes(spec))

    return spec_of


def _also(found: list[Spec], dtype: str) -> list[Spec]:
    return [spec.replace(operands={**spec.operand, "grad": Operand(dtype)}) for spec in found]


def zero(op: str) -> Callable[[str], list[Spec]]:
    """Those of the gate."""
    return lambda dtype: _also(_gates.zero(op)(dtype), dtype)


def classes(op: str) -> Callable[[str], list[Spec]]:
    """NaN in gate, value and gradient, infinities in value and gradient.

    Of an infinite gate no implementation's slope is a number.
    """
    width = 33

    def specs(dtype: str) -> list[Spec]:
        dims = {"tokens": 3, "half": width}
        looks = [
            {"x": ((2 * width + 4, "nan"),)},
            {"x": ((3 * width + 4, "nan"),)},
            {"x": ((3 * width + 4, "inf"),)},
            {"grad": ((width + 4, "nan"),)},
            {"grad": ((width + 4, "inf"),)},
        ]
        return [
            Spec.of(op, dims, {n: Operand(dtype, specials=look.get(n, ())) for n in ("x", "grad")})
            for look in looks
        ]

    return specs


def named(op: str) -> Callable[[str], dict[str, Spec]]:
    """Those of the gate."""

    def specs(dtype: str) -> dict[str, Spec]:
        found = _gates.named(op)(dtype)
        return dict(zip(found, _also(list(found.values()), dtype), strict=True))

    return specs


def silu(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Activation, slope, and the sum of magnitudes of the slope's terms."""
    s, below = torch.sigmoid(g), torch.sigmoid(-g)
    return g * s, s + g * s * below, s + g.abs() * s * below


def gelu(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `silu`, of the normal distribution's integral."""
    integral = 0.5 * torch.special.erfc(-g / math.sqrt(2))
    density = torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
    return g * integral, integral + g * density, integral + g.abs() * density


def gelu_tanh(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `silu`, of the sigmoid of 2 z."""
    root = 2 * math.sqrt(2 / math.pi)
    z = root * (g + 0.044715 * g**3)
    steep = root * (1 + 3 * 0.044715 * g * g)
    s, below = torch.sigmoid(z), torch.sigmoid(-z)
    # Where s * below is 0 its product with an infinite cube is, too.
    turn = torch.where(s * below == 0, 0.0, g * s * below * steep)
    return g * s, s + turn, s + turn.abs()


SLOPES: dict[str, Slopes] = {"silu": silu, "gelu_erf": gelu, "gelu_tanh": gelu_tanh}


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """Exact gradients and their bound.

    An exponential of an argument e errs by ``(8 + 2|e|) a`` relative, in units a of the compute
    dtype: e is g for silu, g^2 / 2 or 2 z for gelu, whose argument itself takes three roundings.
    The slope is a sum of two terms that may cancel: its error is that of their magnitudes M, and
    for gelu ``4 a`` more, where 1 + erf or 1 - s cancels. Products with grad and value add ``4 a``.
    Where an exponential underflows, its term is 0: at most ``2^-119`` times the factors.
    """
    grad, (g, v) = args["grad"].double(), split(args["x"].double())
    dtype = args["x"].dtype
    unit = rounding(dtype)
    activation = contract_field(contract, "activation", *SLOPES)
    act, slope, size = SLOPES[activation](g)
    exponent = g.abs() if activation == "silu" else 2 * g.abs() + 2 * g.abs() ** 3
    relative = (12 + 4 * exponent.clamp(max=200)) * unit.acc
    absolute = torch.zeros_like(g) if activation == "silu" else (4 + 4 * g.abs()) * unit.acc
    floor = (2.0**-1014 if dtype == torch.float64 else 2.0**-119) * (1 + g * g)
    loss = size * relative + absolute + floor
    scale = (grad * v).abs()
    dg, dv = grad * v * slope, grad * act
    under = unit.eta + unit.tiny * unit.acc * (1 + grad.abs())
    bounds = [
        dg.abs() * unit.u + scale * (loss + 4 * unit.acc * slope.abs()) + under * (1 + v.abs()),
        dv.abs() * (unit.u + relative) + grad.abs() * (absolute * g.abs() + floor) + under,
    ]
    value, bound = torch.cat([dg, dv], -1), torch.cat(bounds, -1)
    return (Output("grad_x", value, bound, dtype),)


def _zero_grad(trial: Trial) -> Sequence[Pair] | None:
    if not bool(trial.args["x"].isfinite().all()):
        return None
    (got,) = trial.run(grad=torch.zeros_like(trial.args["grad"]))
    return [Pair("grad_x of a gradient of zero", got, torch.zeros_like(got))]


def _zero_value(trial: Trial) -> Sequence[Pair] | None:
    g, v = split(trial.args["x"])
    if not bool(g.isfinite().all() and trial.args["grad"].isfinite().all()):
        return None
    (got,) = trial.run(x=torch.cat([g, torch.zeros_like(v)], -1))
    dg, dv = split(got)
    return [
        Pair("gradient of the gate, values of zero", dg, torch.zeros_like(dg)),
        Pair("gradient of the value, values of zero", dv, split(trial.outputs[0])[1]),
    ]


def _scaled_grad(trial: Trial) -> Sequence[Pair] | None:
    grad = trial.args["grad"]
    info = torch.finfo(grad.dtype)
    size = grad[grad != 0].abs()
    if size.numel() and not (size.min() >= info.tiny and size.max() <= info.max / 16):
        return None
    (got,) = trial.run(grad=grad * 8)
    return [scaled_pair("grad_x, gradients times 8", got, trial.outputs[0], 3)]


def _open_gate(trial: Trial) -> Sequence[Pair]:
    """From 64 on every activation is the identity to the last bit, and its slope is 1."""
    grad, (g, v) = trial.args["grad"], split(trial.args["x"])
    open_gate = 64 + torch.arange(g.numel(), dtype=torch.float64).remainder(64).reshape(g.shape)
    gate, compute = open_gate.to(g), compute_dtype(g.dtype)
    (got,) = trial.run(x=torch.cat([gate, v], -1))
    wide = grad.to(compute)
    want = torch.cat([wide * v.to(compute), wide * gate.to(compute)], -1).to(g.dtype)
    return [Pair("grad_x of an open gate", got, want)]


LAWS = (
    Law("zero_grad", "f(x, 0) == 0", _zero_grad),
    Law("zero_value", "f((g, 0), grad) == (0, f((g, v), grad)_v)", _zero_value),
    negated("negated_grad", ("grad",), (-1,), "f(x, -grad) == -f(x, grad)"),
    Law("scaled_grad", "f(x, 8 grad) == 8 f(x, grad)", _scaled_grad),
    Law("open_gate", "f((g, v), grad) == RN(grad v, grad g) for g >= 64", _open_gate),
    rounding_bias(),
    permuted_rows(("x", "grad"), "rows don't know each other: f(P args) == P f(args)"),
    alone(("x", "grad")),
)
Pieces = Callable[[Tensor, Tensor, Tensor, Tensor], Sequence[Tensor]]


def _gradients(grad: Tensor, v: Tensor, act: Tensor, slope: Tensor) -> Sequence[Tensor]:
    return grad * v * slope, grad * act


def _kernel(
    slopes: Slopes,
    parts: Pieces = _gradients,
    finish: Callable[[Tensor, torch.dtype], Tensor] = lambda y, dtype: y.to(dtype),
    gate: Callable[[Tensor], Tensor] = lambda g: g,
) -> Callable[[Tensor, Tensor], Tensor]:
    """A plain gradient in pieces, each of which a planted fault replaces."""

    def kernel(x: Tensor, grad: Tensor) -> Tensor:
        compute = compute_dtype(x.dtype)
        g, v = split(x.to(compute).contiguous())
        act, slope, _ = slopes(gate(g))
        return finish(torch.cat([*parts(grad.to(compute), v, act, slope)], -1), x.dtype)

    return kernel


def _rows(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda g: change(g) if g.dim() > 1 and len(g) > 1 else g


def _tail_rows(grad: Tensor, v: Tensor, act: Tensor, slope: Tensor) -> Sequence[Tensor]:
    found = _gradients(grad, v, act, slope)
    return [torch.cat([y[:1], y[:-1]]) if y.dim() > 1 and len(y) else y for y in found]


def mutants(slopes: Slopes, others: Mapping[str, Slopes]) -> tuple[Mutant, ...]:
    """Faults of the gradients of a gate; `others` are activations that it is taken for."""
    plain = _kernel(slopes)

    def parts(change: Pieces) -> Callable[[Tensor, Tensor], Tensor]:
        return _kernel(slopes, change)

    def gated(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return _kernel(slopes, gate=change)

    return (
        *(Mutant(f"is_{name}", ("bound",), _kernel(f)) for name, f in others.items()),
        Mutant("truncated", ("rounding_bias", "bound"), _kernel(slopes, finish=truncated)),
        Mutant("rounded_down", ("rounding_bias", "negated_grad", "bound"),
               _kernel(slopes, finish=floored)),
        Mutant("rounded_up", ("rounding_bias", "negated_grad", "bound"),
               _kernel(slopes, finish=raised)),
        Mutant("absolute_grad", ("negated_grad", "bound"),
               parts(lambda d, v, a, s: _gradients(d.abs(), v, a, s))),
        Mutant("halves_swapped", ("zero_value", "open_gate", "bound"),
               parts(lambda d, v, a, s: _gradients(d, v, a, s)[::-1])),
        Mutant("slope_is_activation", ("bound",), parts(lambda d, v, a, s: (d * v * a, d * a))),
        Mutant("slope_left_out", ("bound",), parts(lambda d, v, a, s: (d * v, d * a))),
        Mutant("value_left_out", ("zero_value", "open_gate", "bound"),
               parts(lambda d, v, a, s: (d * s, d * a))),
        Mutant("value_plus_one", ("zero_value", "bound"),
               parts(lambda d, v, a, s: (d * (v + 1) * s, d * a))),
        Mutant("grad_plus_tiny", ("zero_grad", "bound"),
               parts(lambda d, v, a, s: _gradients(d + 2.0**-10, v, a, s))),
        Mutant("grad_added", ("zero_grad", "bound"),
               parts(lambda d, v, a, s: (d + v * s, d * a))),
        Mutant("grad_left_out", ("zero_grad", "negated_grad", "scaled_grad", "bound"),
               parts(lambda d, v, a, s: (v * s, d * a))),
        Mutant("grad_clipped", ("scaled_grad", "bound"),
               parts(lambda d, v, a, s: _gradients(d.clamp(-2, 2), v, a, s))),
        Mutant("grad_in_float16", ("scaled_grad", "bound"),
               parts(lambda d, v, a, s: _gradients((d * 1e4).half().to(v) / 1e4, v, a, s))),
        Mutant("gate_clipped", ("open_gate", "bound"), gated(lambda g: g.clamp(max=7))),
        Mutant("gate_in_bfloat16", ("open_gate", "bound"),
               gated(lambda g: (g * 1.003).bfloat16().to(g.dtype))),
        Mutant("row_0_gates", ("row_permutation", "bound"),
               gated(_rows(lambda g: g[:1].expand(g.shape)))),
        Mutant("row_before", ("row_permutation", "bound"), gated(_rows(lambda g: g.roll(1, 0)))),
        Mutant("last_row_lost", ("row_permutation", "bound"), parts(_tail_rows)),
        *generic_mutants(plain),
        *batch_mutants(plain, (0, 1)),
    )  # fmt: skip


def gradient_proof(op: str, activation: str) -> Proof:
    """The proof of the gradient of a gated activation."""
    others = {name: slopes for name, slopes in SLOPES.items() if name != activation}
    return Proof(
        op=op,
        arguments=("x", "grad"),
        shapes=shapes,
        draw=strategy(op),
        axes=_gates.AXES,
        row=row(op),
        zero=zero(op),
        classes=classes(op),
        named=named(op),
        oracle=oracle,
        laws=LAWS,
        mutants=mutants(SLOPES[activation], others),
        cost=4,
    )
