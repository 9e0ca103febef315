"""Proof of layer_norm: ``y = (x - mean) / sqrt(var + eps) * weight + bias`` over the last axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.batch_faults import batch_mutants
from torch_ops.testing.faults import floored, generic_mutants, raised, truncated
from torch_ops.testing.laws import alone, homogeneous, negated, permuted_rows, rounding_bias
from torch_ops.testing.proof import Arguments, Law, Mutant, Output, Pair, Proof, Trial
from torch_ops.testing.proofs import _norm_faults as fault
from torch_ops.testing.proofs import _norms
from torch_ops.testing.proofs._norm_faults import layer
from torch_ops.testing.proofs._norm_laws import scale_with_eps

OP = "layer_norm"
ROWS, VECTORS = ("x",), {"weight": True, "bias": True}


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """Exact result and the bound of `_norms.layer_oracle`; no policy changes it."""
    x = args["x"]
    value, bound = _norms.layer_oracle(x, args["weight"], args["bias"], args["eps"])
    return (Output("out", value, bound, x.dtype),)


def _bias_or_zero(trial: Trial) -> Tensor:
    x, bias = trial.args["x"], trial.args["bias"]
    row = torch.zeros_like(x[..., :1]) if bias is None else bias.to(x.dtype)
    return row.expand(x.shape)


def _zero_weight(trial: Trial) -> Sequence[Pair] | None:
    x = trial.args["x"]
    if x.double().abs().max() > 1e16:
        return None
    (got,) = trial.run(weight=torch.zeros(x.shape[-1:], dtype=x.dtype, device=x.device))
    return [Pair("out with a weight of zeros, against the bias", got, _bias_or_zero(trial))]


def _constant_row(trial: Trial) -> Sequence[Pair] | None:
    """Small integers over a power of two of elements: every sum and mean is exact."""
    x = trial.args["x"]
    n = x.shape[-1]
    if n & (n - 1):
        return None
    pairs = []
    for value in (3.0, -1.0, 16.0):
        (got,) = trial.run(x=torch.full_like(x, value))
        pairs.append(Pair(f"out of constant rows of {value}", got, _bias_or_zero(trial)))
    return pairs


def _no_bias(trial: Trial) -> bool:
    return trial.args["bias"] is None


LAWS = (
    scale_with_eps(("x",), (0,)),
    negated("odd", ("x", "bias"), (-1,), "f(-x, w, -b) == -f(x, w, b)"),
    permuted_rows(("x",), "rows don't know each other: f(P x) == P f(x)", oracle),
    alone(("x",)),
    homogeneous("weight_scale", {"weight": 3}, (3,), "f(x, 8 w) == 8 f(x, w) without a bias",
                applies=_no_bias),
    Law("zero_weight", "f(x, 0, b) == b", _zero_weight),
    rounding_bias(),
    Law("constant_row", "f(c) == b for a constant row whose sums are exact", _constant_row),
)  # fmt: skip


def _mean(change: Any) -> Any:
    return lambda x: change(x.mean(-1, keepdim=True))


def _variance(change: Any) -> Any:
    return lambda x, mu: change(fault.mean_square(x - mu))


_layer = layer()
MUTANTS = (
    Mutant("one_pass_variance", ("bound",), layer(variance=fault.one_pass)),
    Mutant("padding_counted", ("bound",), layer(variance=fault.counted_padding)),
    Mutant("mean_ignored", ("bound", "constant_row"),
           layer(mean=lambda x: torch.zeros_like(x[..., :1]))),
    Mutant("mean_in_bfloat16", ("bound",), layer(mean=_mean(lambda m: m.bfloat16().to(m.dtype)))),
    Mutant("divided_by_n_minus_1", ("bound",),
           layer(variance=lambda x, mu: fault.bessel(x - mu))),
    Mutant("truncated", ("rounding_bias", "bound",), layer(finish=truncated)),
    Mutant("eps_fixed", ("scale_with_eps", "bound"), layer(root=fault.with_eps(lambda _: 1e-5))),
    Mutant("eps_outside_root", ("scale_with_eps", "bound"), layer(root=fault.eps_outside)),
    Mutant("root_of_eps_added", ("bound",), layer(root=fault.eps_squared)),
    Mutant("variance_clamped", ("scale_with_eps", "bound"),
           layer(variance=_variance(lambda v: v.clamp(1e-3, 1e3)))),
    Mutant("rounded_down", ("rounding_bias", "odd", "bound"), layer(finish=floored)),
    Mutant("rounded_up", ("rounding_bias", "odd", "bound"), layer(finish=raised)),
    Mutant("absolute_mean", ("odd", "bound"), layer(mean=_mean(torch.abs))),
    Mutant("row_0_mean", ("row_permutation", "bound"), layer(mean=_mean(fault.first_row))),
    Mutant("row_before", ("row_permutation", "bound"),
           layer(variance=_variance(fault.previous_row))),
    Mutant("row_index_cut", ("row_permutation", "bound"),
           layer(variance=_variance(fault.repeated_rows(4)))),
    Mutant("weight_ignored", ("weight_scale", "zero_weight", "bound"),
           lambda x, weight=None, bias=None, eps=1e-5: _layer(x, None, bias, eps)),
    Mutant("one_plus_weight", ("weight_scale", "zero_weight", "bound"),
           lambda x, weight=None, bias=None, eps=1e-5: _layer(
               x, None if weight is None else 1 + weight, bias, eps)),
    Mutant("result_clipped", ("weight_scale", "bound"), layer(finish=fault.clipped(2.0))),
    Mutant("bias_scaled_by_weight", ("zero_weight", "bound"),
           lambda x, weight=None, bias=None, eps=1e-5: _layer(
               x, weight, bias if weight is None or bias is None else bias * weight, eps)),
    Mutant("bias_ignored", ("zero_weight", "constant_row", "bound"),
           lambda x, weight=None, bias=None, eps=1e-5: _layer(x, weight, None, eps)),
    Mutant("mean_without_last", ("constant_row", "bound"),
           layer(mean=lambda x: x[..., :-1].sum(-1, keepdim=True) / max(x.shape[-1], 1))),
    Mutant("eps_missing", ("constant_row", "bound"), layer(root=fault.without_eps)),
    *generic_mutants(_layer),
    *batch_mutants(_layer, (0,)),
)  # fmt: skip

proof = Proof(
    op=OP,
    arguments=("x", "weight", "bias", "eps"),
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
