"""What the proofs of gradients of norms share: Specs, the float64 oracle and its bounds, laws.

With ``x_hat = (x - mu) r``, ``g = grad w`` and ``s = mean(g x_hat)``: ``dx = r (g - mean(g) -
x_hat s)``, ``dw = sum(grad x_hat)`` and ``db = sum(grad)`` over all rows; of an rms norm mu and
mean(g) are left out. Notation of bounds is that of `_norms`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops.testing import draw as pieces
from torch_ops.testing._hypothesis import DrawFn, SearchStrategy
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.arithmetic import rounding
from torch_ops.testing.laws import (
    flip_rows,
    homogeneous,
    in_range,
    negated,
    rounding_bias,
    safe_exponents,
    scaled,
    scaled_pair,
    twice,
)
from torch_ops.testing.proof import Arguments, Law, Output, Pair, Proof, Shapes, Trial
from torch_ops.testing.proofs import _norms
from torch_ops.testing.proofs._norm_laws import scale_with_eps
from torch_ops.testing.spec import Operand, Spec

GRADS = ("normal", "ones", "grid", "sparse", "rows", "small")
ROWS = ("x", "grad")


class Form(NamedTuple):
    """What one of the ops differs in.

    Attributes:
        op: Its name.
        center: Whether the norm subtracts the mean; it has a bias then, and else a residual.
    """

    op: str
    center: bool

    @property
    def vectors(self) -> dict[str, bool]:
        """The vectors, which may all be absent."""
        return {"weight": True, "bias": True} if self.center else {"weight": True}

    @property
    def rows(self) -> tuple[str, ...]:
        """What looks like x, an absent gradient of the residual too."""
        return ROWS if self.center else (*ROWS, "residual_grad")

    @property
    def arguments(self) -> tuple[str, ...]:
        """In the order of the signature."""
        if self.center:
            return (*ROWS, "weight", "bias", "eps")
        return (*ROWS, "weight", "residual_grad", "eps", "one_plus")

    def shapes(self, spec: Spec) -> Shapes:
        """Shapes of the tensors."""
        return _norms.shapes(self.rows, tuple(self.vectors))(spec)

    def with_flag(self, spec: Spec, one_plus: bool) -> Spec:
        """Say how the weight is stored, where the op asks."""
        return spec if self.center else spec.replace(params={**spec.param, "one_plus": one_plus})


def strategy(form: Form) -> Callable[[str, int], SearchStrategy[Spec]]:
    """Strategy of Specs: those of the norm, with gradients."""
    norm = _norms.strategy(form.op, ("x",), form.vectors)

    @st.composite
    def specs(draw: DrawFn, dtype: str, budget: int) -> Spec:
        spec = draw(norm(dtype, budget))
        found = spec.operand
        for name in form.rows[1:]:
            if name == "grad" or draw(st.booleans()):
                found[name] = draw(pieces.operand(dtype, _norms.shape_of(spec), GRADS))
        return form.with_flag(spec.replace(operands=found), draw(st.booleans()))

    return specs


def row(form: Form) -> Callable[[str, Mapping[str, Any]], Spec]:
    """Maker of Specs from rows of the covering array."""
    norm = _norms.row(form.op, ("x",), form.vectors)

    def spec_of(dtype: str, choice: Mapping[str, Any]) -> Spec:
        spec = norm(dtype, choice)
        found = spec.operand
        others = ("normal",) if choice["regime"] == "normal" else ("ones", "rows", "normal")
        for name in form.rows[1:]:
            if name == "grad" or pieces.pick(choice, name, (True, False)):
                layout = pieces.pick(choice, name, ("contig", "row_stride", "step2", "misalign"))
                found[name] = Operand(dtype, layout, pieces.pick(choice, f"{name}s", others))
        flagged = form.with_flag(spec, pieces.pick(choice, "one_plus", (False, True)))
        return pieces.fitted(flagged.replace(operands=found), form.shapes(spec))

    return spec_of


def fixed(form: Form, part: str) -> Callable[[str], list[Spec]]:
    """Specs of size zero or with NaN and infinities, as those of the norm."""
    norm = getattr(_norms, part)(form.op, form.rows, tuple(form.vectors))
    return lambda dtype: [form.with_flag(spec, False) for spec in norm(dtype)]


def named(form: Form) -> Callable[[str], dict[str, Spec]]:
    """Rows of models."""
    norm = _norms.named(form.op, form.rows, tuple(form.vectors))
    return lambda dtype: {n: form.with_flag(spec, False) for n, spec in norm(dtype).items()}


class Exact(NamedTuple):
    """Exact values of one call, in float64.

    Attributes:
        x_hat: Normalized rows.
        off: Bound of the error of x_hat.
        r: Inverse roots.
        spread: Bound of their relative error.
    """

    x_hat: Tensor
    off: Tensor
    r: Tensor
    spread: Tensor


def _normalized(x: Tensor, eps: float, center: bool) -> Exact:
    """x_hat and r as in `_norms.layer_oracle`; the mean of an rms norm is 0, and m with it.

    ``m = (sqrt(n) + 4) a mean|x|`` is the error of the mean. The inverse root errs by ``q = (2
    sqrt(n) + 8) a + (r m)^2`` relative, x_hat by ``h = r (m + 2 a |x - mu|) + q |x_hat| + tiny a``.
    """
    unit, exact = rounding(x.dtype), x.double()
    root = x.shape[-1] ** 0.5
    centered, m = exact, torch.zeros_like(exact[..., :1])
    if center:
        centered = exact - exact.mean(-1, keepdim=True)
        m = (root + 4) * unit.acc * exact.abs().mean(-1, keepdim=True)
    r = (centered.square().mean(-1, keepdim=True) + eps).rsqrt()
    x_hat = centered * r
    q = (2 * root + 8) * unit.acc + (r * m).square()
    h = r * (m + 2 * unit.acc * centered.abs()) + q * x_hat.abs() + unit.tiny * unit.acc
    return Exact(x_hat, h, r, q)


def _gain(args: Arguments) -> Tensor:
    weight = args["weight"]
    if weight is None:
        return torch.ones((), dtype=torch.float64)
    gain: Tensor = weight.double() + float(args.get("one_plus", False))
    return gain


def _dx(args: Arguments, exact: Exact, center: bool) -> tuple[Tensor, Tensor]:
    """dx and its bound.

    g errs by ``2 a |g|``, and ``a |grad|`` where 1 + w is rounded; mean(g) by ``(2 sqrt(n) + 4) a
    mean|g|``; s by ``mean(|g| h) + (2 sqrt(n) + 6) a mean|g x_hat|``. With s off by S, the
    difference errs by what these do, ``h (|s| + S) + |x_hat| S`` for the product, and ``3 a`` of
    the magnitudes M of its terms. The product with r adds ``q + 2 a`` of the result.
    """
    unit, root = rounding(args["x"].dtype), args["x"].shape[-1] ** 0.5
    a, grad, gain = unit.acc, args["grad"].double(), _gain(args)
    x_hat, h, r, q = exact
    g = grad * gain
    bar = g.mean(-1, keepdim=True) if center else torch.zeros_like(r)
    s = (g * x_hat).mean(-1, keepdim=True)
    size = g.abs().mean(-1, keepdim=True) if center else torch.zeros_like(r)
    off_s = (g.abs() * h).mean(-1, keepdim=True) + unit.tiny * a * (1 + r)
    off_s = off_s + (2 * root + 6) * a * (g * x_hat).abs().mean(-1, keepdim=True)
    terms = g.abs() + bar.abs() + (x_hat * s).abs()
    inner = a * (3 * terms + 2 * g.abs() + grad.abs()) + (2 * root + 4) * a * size
    inner = inner + h * (s.abs() + off_s) + x_hat.abs() * off_s + 3 * unit.tiny * a
    dx = r * (g - bar - x_hat * s)
    bound = r * inner * (1 + q + 2 * a) + dx.abs() * (q + 2 * a) + unit.tiny * a
    if args.get("residual_grad") is not None:
        dx = dx + args["residual_grad"].double()
        bound = bound + a * dx.abs()
    return dx, bound + dx.abs() * unit.u + unit.eta


def _sum(
    name: str, terms: Tensor, off: Tensor, vector: Tensor | None, args: Arguments
) -> tuple[str, Tensor, Tensor, torch.dtype]:
    """A sum over T rows, in any order: ``T a`` of the magnitudes, beside what the terms err by."""
    acc = rounding(args["x"].dtype)
    if vector is None:
        nothing = terms.new_empty(0)
        return name, nothing, nothing, args["x"].dtype
    terms, off = (t.flatten(0, -2) if t.dim() > 1 else t.unsqueeze(0) for t in (terms, off))
    count = terms.shape[0] + 1
    value, own = terms.sum(0), rounding(vector.dtype)
    loose = off.sum(0) + count * acc.acc * terms.abs().sum(0) + count * acc.tiny * acc.acc
    return name, value, value.abs() * own.u + own.eta + loose, vector.dtype


def oracle(form: Form) -> Callable[[Arguments, Any], tuple[Output, ...]]:
    """Exact gradients and bounds: ``grad x_hat`` errs by ``|grad| (h + a |x_hat|)``."""

    def outputs(args: Arguments, contract: Any) -> tuple[Output, ...]:
        x, grad = args["x"], args["grad"].double()
        unit = rounding(x.dtype)
        exact = _normalized(x, args["eps"], form.center)
        off = grad.abs() * (exact.off + unit.acc * exact.x_hat.abs())
        found = [("dx", *_dx(args, exact, form.center), x.dtype)]
        found.append(_sum("dweight", grad * exact.x_hat, off, args["weight"], args))
        if form.center:
            found.append(_sum("dbias", grad, torch.zeros_like(grad), args["bias"], args))
        return tuple(Output(*each) for each in found)

    return outputs


def _residual(trial: Trial) -> Tensor:
    given = trial.args.get("residual_grad")
    return torch.zeros_like(trial.args["x"]) if given is None else given


def _finite(trial: Trial) -> bool:
    return all(bool(trial.args[n].isfinite().all()) for n in ROWS)


def _zero_grad(trial: Trial) -> Sequence[Pair] | None:
    if not _finite(trial):
        return None
    dx, *sums = trial.run(grad=torch.zeros_like(trial.args["grad"]))
    return [
        Pair("dx of a gradient of zero, against that of the residual", dx, _residual(trial)),
        *(
            Pair(f"sum {i} of gradients of zero", s, torch.zeros_like(s))
            for i, s in enumerate(sums)
        ),
    ]


def _zero_gain(trial: Trial) -> Sequence[Pair] | None:
    weight = trial.args["weight"]
    if weight is None or not _finite(trial):
        return None
    none = torch.full_like(weight, -1.0 if trial.args.get("one_plus") else 0.0)
    dx, *sums = trial.run(weight=none)
    return [
        Pair("dx of a weight of zeros, against the residual's gradient", dx, _residual(trial)),
        *(
            Pair(f"sum {i}, whatever the weight", a, b)
            for i, (a, b) in enumerate(zip(sums, trial.outputs[1:], strict=True))
        ),
    ]


def _absent_weight(form: Form) -> Law:
    """A compiler may fuse a product with ones and the difference after it into one rounding."""

    def pairs(trial: Trial) -> Sequence[Pair]:
        x = trial.args["x"]
        ones = torch.full(x.shape[-1:], 0.0 if trial.args.get("one_plus") else 1.0, dtype=x.dtype)
        without, with_ones = trial.run(weight=None)[0], trial.run(weight=ones.to(x.device))[0]
        bound = twice(oracle(form)({**trial.args, "weight": None}, trial.contract)[0].bound)
        return [Pair("dx without a weight, against one of ones", without, with_ones, bound)]

    return Law("absent_weight", "f(x, d, None).dx == f(x, d, 1).dx", pairs)


def _permuted(trial: Trial) -> Sequence[Pair] | None:
    """Rows are added in another order then, and vectorized code may end its loops otherwise."""
    names = [n for n in (*ROWS, "residual_grad") if trial.args.get(n) is not None]
    if trial.args["x"].dim() < 2 or trial.args["x"].shape[0] == 1:
        return None
    got = trial.run(**{n: flip_rows(trial.args[n]) for n in names})
    found = []
    for i, (a, b, want) in enumerate(zip(got, trial.outputs, trial.expected, strict=True)):
        assert want.bound is not None
        turn = flip_rows if i == 0 else torch.Tensor.clone
        found.append(Pair(f"output {i}, rows reversed", a, turn(b), 2 * turn(want.bound)))
    return found


def _weight_scale(trial: Trial) -> Sequence[Pair] | None:
    weight = trial.args["weight"]
    if weight is None or trial.args.get("one_plus"):
        return None
    if not in_range(weight, *safe_exponents(weight.dtype)):
        return None
    none = {} if trial.args.get("residual_grad") is None else {"residual_grad": None}
    base = trial.run(**none) if none else trial.outputs
    dx, *sums = trial.run(weight=scaled(weight, 3), **none)
    return [
        scaled_pair("dx of a weight times 8", dx, base[0], 3),
        *(
            Pair(f"sum {i}, weight scaled", *both)
            for i, both in enumerate(zip(sums, base[1:], strict=True))
        ),
    ]


def _one_row(trial: Trial) -> Sequence[Pair] | None:
    bias = trial.args["bias"]
    if bias is None or not trial.args["x"].numel():
        return None
    columns = trial.args["x"].shape[-1]
    first = {n: trial.args[n].reshape(-1, columns)[:1] for n in ROWS}
    got = trial.run(**first)[2]
    return [Pair("dbias of one row, against its gradient", got, first["grad"][0].to(bias.dtype))]


def laws(form: Form) -> tuple[Law, ...]:
    """Laws of the op."""
    grads, count = form.rows[1:], 2 + form.center
    one_row = Law("one_row", "f(row).dbias == grad", _one_row)
    return (
        Law("zero_grad", "f(x, 0, w, e) == (e, 0)", _zero_grad),
        Law("zero_gain", "f(x, d, 0, e).dx == e, and dweight doesn't change", _zero_gain),
        negated("negated_grad", grads, (-1,) * count, "f(x, -d, w, -e) == -f(x, d, w, e)"),
        negated("odd", ("x",), (1, -1, 1)[:count],
                "f(-x, d) is f(x, d), but for -dweight"),
        homogeneous("scaled_grad", dict.fromkeys(grads, 3), (3,) * count,
                    "f(x, 8 d, w, 8 e) == 8 f(x, d, w, e)"),
        Law("weight_scale", "f(x, d, 8 w) == (8 dx, dweight)", _weight_scale),
        scale_with_eps(("x",), (-1, 0, 0)[:count], fixed="" if form.center else "residual_grad"),
        _absent_weight(form),
        Law("row_permutation", "f(P x, P d) == (P dx, dweight)", _permuted),
        *((one_row,) if form.center else ()),
        rounding_bias(),
    )  # fmt: skip


def gradient_proof(form: Form, mutants: Any) -> Proof:
    """The proof of an op, given its planted faults."""
    return Proof(
        op=form.op,
        arguments=form.arguments,
        shapes=form.shapes,
        draw=strategy(form),
        axes=_norms.AXES,
        row=row(form),
        zero=fixed(form, "zero"),
        classes=fixed(form, "classes"),
        named=named(form),
        oracle=oracle(form),
        laws=laws(form),
        mutants=mutants,
        cost=8,
    )
