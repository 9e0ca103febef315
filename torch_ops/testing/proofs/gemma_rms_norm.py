"""Proof of gemma_rms_norm: ``y = x / sqrt(mean(x^2) + eps) * (1 + weight)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_ops.testing.batch_faults import batch_mutants
from torch_ops.testing.faults import floored, generic_mutants, raised, truncated
from torch_ops.testing.laws import alone, negated, permuted_rows, rounding_bias, scaled_pair
from torch_ops.testing.proof import Arguments, Law, Mutant, Output, Pair, Proof, Trial
from torch_ops.testing.proofs import _norm_faults as fault
from torch_ops.testing.proofs import _norms
from torch_ops.testing.proofs._norm_faults import rms
from torch_ops.testing.proofs._norm_laws import scale_with_eps, zero_rows

OP = "gemma_rms_norm"
ROWS, VECTORS = ("x",), {"weight": False}


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """Exact result and the bound of `_norms.rms_bound`."""
    x, policy = args["x"], _norms.weight_policy(contract)
    value, bound = _norms.rms_oracle(x, args["weight"], args["eps"], policy, x.dtype)
    return (Output("out", value, bound, x.dtype),)


def _powers_of_gain(trial: Trial) -> Sequence[Pair]:
    weight = trial.args["weight"]
    (plain,) = trial.run(weight=torch.zeros_like(weight))
    pairs = []
    for power in (1, 3, 5):
        (got,) = trial.run(weight=torch.full_like(weight, 2.0**power - 1))
        pairs.append(scaled_pair(f"out with weight 2^{power} - 1", got, plain, power))
    return pairs


def _no_gain(trial: Trial) -> Sequence[Pair]:
    (got,) = trial.run(weight=torch.full_like(trial.args["weight"], -1.0))
    finite = torch.where(trial.args["x"].isfinite(), got, torch.zeros_like(got))
    return [Pair("out with weight -1", finite, torch.zeros_like(got))]


LAWS = (
    scale_with_eps(("x",), (0,)),
    negated("odd", ("x",), (-1,), "f(-x) == -f(x)"),
    permuted_rows(("x",), "rows don't know each other: f(P x) == P f(x)", oracle),
    alone(("x",)),
    zero_rows(("x",)),
    rounding_bias(),
    Law("powers_of_gain", "f(x, 2^k - 1) == 2^k f(x, 0)", _powers_of_gain),
    Law("no_gain", "f(x, -1) == 0", _no_gain),
)

_square = fault.mean_square
_gemma = rms(gain=fault.one_plus)


def _one_plus(**pieces: Any) -> Any:
    return rms(gain=fault.one_plus, **pieces)


MUTANTS = (
    Mutant("eps_fixed", ("scale_with_eps", "bound"),
           _one_plus(root=fault.with_eps(lambda _: 1e-5))),
    Mutant("eps_outside_root", ("scale_with_eps", "bound"), _one_plus(root=fault.eps_outside)),
    Mutant("squares_in_float16", ("scale_with_eps", "bound"),
           _one_plus(mean=fault.in_half_precision)),
    Mutant("eps_tenfold", ("bound",), _one_plus(root=fault.with_eps(lambda eps: 10 * eps))),
    Mutant("last_element_dropped", ("bound",), _one_plus(mean=fault.without_last)),
    Mutant("variance_ignored", ("bound",), _one_plus(mean=fault.no_variance)),
    Mutant("truncated", ("rounding_bias", "bound",), _one_plus(finish=truncated)),
    Mutant("one_plus_weight_in_dtype", ("bound",),
           rms(gain=lambda w, d: (1 + w.bfloat16()).to(d))),
    Mutant("rounded_down", ("rounding_bias", "odd", "bound"), _one_plus(finish=floored)),
    Mutant("rounded_up", ("rounding_bias", "odd", "bound"), _one_plus(finish=raised)),
    Mutant("absolute_value", ("odd", "bound"), _one_plus(finish=lambda y, d: y.abs().to(d))),
    Mutant("row_0_for_all", ("row_permutation", "bound"),
           _one_plus(mean=fault.after(_square, fault.first_row))),
    Mutant("row_before", ("row_permutation", "bound"),
           _one_plus(mean=fault.after(_square, fault.previous_row))),
    Mutant("row_index_cut", ("row_permutation", "bound"),
           _one_plus(mean=fault.after(_square, fault.repeated_rows(4)))),
    Mutant("no_eps", ("zero_rows", "bound"), _one_plus(root=fault.without_eps)),
    Mutant("eps_in_float16", ("zero_rows", "bound"), _one_plus(root=fault.eps_in_half)),
    Mutant("tiny_added", ("zero_rows",), _one_plus(finish=lambda y, d: (y + 1e-4).to(d))),
    Mutant("no_one", ("powers_of_gain", "no_gain", "bound"), rms()),
    Mutant("one_twice", ("powers_of_gain", "no_gain", "bound"), rms(gain=lambda w, d: 2 + w.to(d))),
    Mutant("gain_clipped", ("powers_of_gain", "bound"),
           rms(gain=lambda w, d: (1 + w.to(d)).clamp(0.25, 2))),
    Mutant("gain_never_zero", ("no_gain", "bound"),
           rms(gain=lambda w, d: (1 + w.to(d)).clamp(min=1e-2))),
    *generic_mutants(_gemma),
    *batch_mutants(_gemma, (0,)),
)  # fmt: skip

proof = Proof(
    op=OP,
    arguments=("x", "weight", "eps"),
    shapes=_norms.shapes(ROWS, tuple(VECTORS)),
    draw=_norms.strategy(OP, ROWS, VECTORS),
    axes=_norms.AXES,
    row=_norms.row(OP, ROWS, VECTORS),
    zero=_norms.zero(OP, ROWS, tuple(VECTORS)),
    classes=_norms.classes(OP, ROWS, tuple(VECTORS)),
    named=_norms.named(OP, ROWS, tuple(VECTORS)),
    oracle=oracle,
    laws=LAWS,
    mutants=MUTANTS,
)
