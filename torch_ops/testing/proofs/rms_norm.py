"""Proof of rms_norm: ``y = x / sqrt(mean(x^2) + eps) * weight`` over the last axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_ops.testing.batch_faults import batch_mutants
from torch_ops.testing.faults import floored, generic_mutants, raised, truncated
from torch_ops.testing.laws import (
    alone,
    homogeneous,
    negated,
    permuted_rows,
    rounding_bias,
    twice,
)
from torch_ops.testing.proof import Arguments, Law, Mutant, Output, Pair, Proof, Trial
from torch_ops.testing.proofs import _norm_faults as fault
from torch_ops.testing.proofs import _norms
from torch_ops.testing.proofs._norm_faults import rms
from torch_ops.testing.proofs._norm_laws import scale_with_eps, zero_rows

OP = "rms_norm"
ROWS, VECTORS = ("x",), {"weight": True}


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """Exact result and the bound of `_norms.rms_bound`."""
    x, weight = args["x"], args["weight"]
    policy = _norms.weight_policy(contract)
    value, bound = _norms.rms_oracle(x, weight, args["eps"], policy, x.dtype)
    return (Output("out", value, bound, x.dtype),)


def _absent_weight(trial: Trial) -> Sequence[Pair] | None:
    """Without batch invariance within twice the bound: a compiler tunes how both add up a row."""
    x = trial.args["x"]
    ones = torch.ones(x.shape[-1:], dtype=x.dtype, device=x.device)
    (without,), (with_ones,) = trial.run(weight=None), trial.run(weight=ones)
    bound = None
    if not trial.contract.batch_invariant:
        bound = twice(oracle({**trial.args, "weight": None}, trial.contract)[0].bound)
    return [Pair("out without a weight, against a weight of ones", without, with_ones, bound)]


LAWS = (
    scale_with_eps(("x",), (0,)),
    negated("odd", ("x",), (-1,), "f(-x) == -f(x)"),
    permuted_rows(("x",), "rows don't know each other: f(P x) == P f(x)", oracle),
    alone(("x",)),
    homogeneous("weight_scale", {"weight": 3}, (3,), "f(x, 8 w) == 8 f(x, w)"),
    zero_rows(("x",)),
    rounding_bias(),
    Law("absent_weight", "f(x, None) == f(x, 1)", _absent_weight),
)

_square = fault.mean_square
MUTANTS = (
    Mutant("eps_fixed", ("scale_with_eps", "bound"), rms(root=fault.with_eps(lambda _: 1e-5))),
    Mutant("eps_outside_root", ("scale_with_eps", "bound"), rms(root=fault.eps_outside)),
    Mutant("squares_in_float16", ("scale_with_eps", "bound"), rms(mean=fault.in_half_precision)),
    Mutant("eps_tenfold", ("bound",), rms(root=fault.with_eps(lambda eps: 10 * eps))),
    Mutant("eps_as_floor", ("bound",), rms(root=fault.eps_as_floor)),
    Mutant("last_element_dropped", ("bound",), rms(mean=fault.without_last)),
    Mutant("divided_by_n_minus_1", ("bound",), rms(mean=fault.bessel)),
    Mutant("padding_counted", ("bound",), rms(mean=fault.padded_block)),
    Mutant("half_of_the_row", ("bound",), rms(mean=fault.half_row)),
    Mutant("variance_ignored", ("bound", "scale_with_eps"), rms(mean=fault.no_variance)),
    Mutant("root_rounded", ("bound",), rms(root=fault.rounded_root)),
    Mutant("truncated", ("rounding_bias", "bound",), rms(finish=truncated)),
    Mutant("rounded_down", ("rounding_bias", "odd", "bound"), rms(finish=floored)),
    Mutant("rounded_up", ("rounding_bias", "odd", "bound"), rms(finish=raised)),
    Mutant("ties_up", ("odd",), rms(finish=fault.half_up)),
    Mutant("absolute_value", ("odd", "bound"), rms(finish=lambda y, d: y.abs().to(d))),
    Mutant("row_0_for_all", ("row_permutation", "bound"),
           rms(mean=fault.after(_square, fault.first_row))),
    Mutant("row_before", ("row_permutation", "bound"),
           rms(mean=fault.after(_square, fault.previous_row))),
    Mutant("row_index_cut", ("row_permutation", "bound"),
           rms(mean=fault.after(_square, fault.repeated_rows(4)))),
    Mutant("mean_of_batch", ("bound",), rms(mean=fault.after(_square, fault.batch_mean))),
    Mutant("one_plus_weight", ("weight_scale", "bound"), rms(gain=fault.one_plus)),
    Mutant("weight_ignored", ("weight_scale", "bound"),
           lambda x, weight=None, eps=1e-6: rms()(x, None, eps)),
    Mutant("result_clipped", ("weight_scale", "bound"), rms(finish=fault.clipped(2.0))),
    Mutant("no_eps", ("zero_rows", "bound"), rms(root=fault.without_eps)),
    Mutant("eps_in_float16", ("zero_rows", "bound"), rms(root=fault.eps_in_half)),
    Mutant("tiny_added", ("zero_rows",), rms(finish=lambda y, d: (y + 1e-4).to(d))),
    Mutant("absent_weight_is_zero", ("absent_weight", "bound"),
           lambda x, weight=None, eps=1e-6: rms()(
               x, torch.zeros_like(x[(0,) * (x.dim() - 1)]) if weight is None and x.numel()
               else weight, eps)),
    Mutant("absent_weight_halves", ("absent_weight", "bound"),
           lambda x, weight=None, eps=1e-6: rms()(x, weight, eps) * (0.5 if weight is None else 1)),
    Mutant("absent_weight_is_above_one", ("absent_weight", "bound"),
           lambda x, weight=None, eps=1e-6: rms()(x, weight, eps) * (
               1 + 2.0**-5 if weight is None else 1)),
    Mutant("cast_then_multiply", ("bound",),
           lambda x, weight=None, eps=1e-6: rms()(x, None, eps) * (
               1 if weight is None else weight.to(x.dtype))),
    *generic_mutants(rms()),
    *batch_mutants(rms(), (0,)),
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
