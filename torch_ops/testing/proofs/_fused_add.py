"""Proof of adding a residual and normalizing: shared by the functional and the mutating op.

``residual_out = RN(x + residual)`` is exact bit for bit; the norm is of residual_out as it is
stored, or of the unrounded sum, as the contract declares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.arithmetic import compute_dtype, contract_field, rounding
from torch_ops.testing.batch_faults import batch_mutants
from torch_ops.testing.faults import (
    floored,
    generic_mutants,
    mutating_mutants,
    raised,
    truncated,
)
from torch_ops.testing.laws import alone, flip_rows, negated, permuted_rows, rounding_bias
from torch_ops.testing.proof import Arguments, Law, Mutant, Output, Pair, Proof, Trial
from torch_ops.testing.proofs import _norm_faults as fault
from torch_ops.testing.proofs import _norms
from torch_ops.testing.proofs._norm_faults import Gain, fused_add, rms
from torch_ops.testing.proofs._norm_laws import scale_with_eps, zero_rows

ROWS, VECTORS = ("x", "residual"), {"weight": False}


def total(x: Tensor, residual: Tensor) -> Tensor:
    """RN(x + residual): the sum of two floats of a narrow dtype is rounded once from float32.

    float32 holds the sum of two float16 or bfloat16 exactly or is at least twice as precise plus
    two bits, so that rounding twice gives what rounding once gives.
    """
    compute = compute_dtype(x.dtype)
    return (x.to(compute) + residual.to(compute)).to(x.dtype)


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """The bound of `_norms.rms_bound` for the norm; residual_out has none: it is exact."""
    x, residual = args["x"], args["residual"]
    stored = total(x, residual)
    policy = contract_field(contract, "residual", "norm_of_rounded", "norm_of_exact")
    exact = stored if policy == "norm_of_rounded" else x.double() + residual.double()
    weight_mul = _norms.weight_policy(contract)
    value, bound = _norms.rms_oracle(exact, args["weight"], args["eps"], weight_mul, x.dtype)
    if policy == "norm_of_exact":  # the sum is rounded in the compute dtype, here and in the mean
        bound = bound + 2 * rounding(x.dtype).acc * value.abs()
    return Output("out", value, bound, x.dtype), Output("residual_out", stored, None, x.dtype)


def _swapped(trial: Trial) -> Sequence[Pair]:
    got = trial.run(x=trial.args["residual"], residual=trial.args["x"])
    return [
        Pair(f"output {i}, x and residual swapped", a, b)
        for i, (a, b) in enumerate(zip(got, trial.outputs, strict=True))
    ]


def _stored_sum(trial: Trial) -> Sequence[Pair]:
    stored = total(trial.args["x"], trial.args["residual"])
    return [Pair("residual_out against RN(x + residual)", trial.outputs[1], stored)]


def _norm_of_stored(trial: Trial) -> Sequence[Pair] | None:
    if trial.contract.residual != "norm_of_rounded":
        return None
    stored = total(trial.args["x"], trial.args["residual"])
    got = trial.run(x=stored, residual=torch.zeros_like(stored))
    return [Pair("out against that of the stored sum and no residual", got[0], trial.outputs[0])]


LAWS = (
    Law("stored_sum", "residual_out == RN(x + residual)", _stored_sum),
    Law("swap", "f(x, r) == f(r, x)", _swapped),
    Law("norm_of_stored", "f(x, r).out == f(RN(x + r), 0).out", _norm_of_stored),
    scale_with_eps(("x", "residual"), (0, 1)),
    negated("odd", ("x", "residual"), (-1, -1), "f(-x, -r) == -f(x, r)"),
    permuted_rows(
        ("x", "residual"), "rows don't know each other: f(P x, P r) == P f(x, r)", oracle
    ),
    alone(("x", "residual")),
    zero_rows(("x", "residual")),
    rounding_bias(),
)


def _in_dtype(x: Tensor, residual: Tensor) -> Tensor:
    return (x.bfloat16() + residual.bfloat16()).to(x.dtype)


def _wrong_row(x: Tensor, residual: Tensor) -> Tensor:
    return x + (flip_rows(residual) if residual.dim() > 1 else residual)


_square = fault.mean_square


def _mutants(gain: Gain) -> tuple[Mutant, ...]:
    """Planted faults of the norm with this gain."""

    def norm(**pieces: Any) -> Any:
        return rms(**{"gain": gain, **pieces})

    def fused(**pieces: Any) -> Any:
        return fused_add(norm(**pieces))

    def plain(**pieces: Any) -> Any:
        return fused_add(norm(), **pieces)

    other = fault.plain if gain is fault.one_plus else fault.one_plus
    return (
        Mutant("sum_truncated", ("stored_sum", "bound"), plain(store=truncated)),
        Mutant("sum_in_bfloat16", ("stored_sum", "bound"), plain(add=_in_dtype)),
        Mutant("residual_not_added", ("stored_sum", "swap", "bound"), plain(add=lambda x, r: x)),
        Mutant("residual_of_other_row", ("stored_sum", "swap", "bound"), plain(add=_wrong_row)),
        Mutant("residual_scaled", ("swap", "bound"), plain(add=lambda x, r: x + r * (1 + 2**-6))),
        Mutant("norm_of_exact_sum", ("norm_of_stored", "bound"), plain(exact=True)),
        Mutant("norm_of_x", ("norm_of_stored", "swap", "bound"),
               lambda x, r, w, eps=1e-6: (norm()(x, w, eps), plain()(x, r, w, eps)[1])),
        Mutant("norm_of_residual", ("norm_of_stored", "swap", "bound"),
               lambda x, r, w, eps=1e-6: (norm()(r, w, eps), plain()(x, r, w, eps)[1])),
        Mutant("eps_fixed", ("scale_with_eps", "bound"),
               fused(root=fault.with_eps(lambda _: 1e-5))),
        Mutant("eps_outside_root", ("scale_with_eps", "bound"), fused(root=fault.eps_outside)),
        Mutant("squares_in_float16", ("scale_with_eps", "bound"),
               fused(mean=fault.in_half_precision)),
        Mutant("last_element_dropped", ("bound",), fused(mean=fault.without_last)),
        Mutant("variance_ignored", ("bound",), fused(mean=fault.no_variance)),
        Mutant("truncated", ("rounding_bias", "bound",), fused(finish=truncated)),
        Mutant("cast_then_multiply", ("bound",), fused_add(
            lambda x, w, eps=1e-6: norm()(x, None, eps) * gain(w, x.dtype))),
        Mutant("rounded_down", ("rounding_bias", "odd", "bound"), fused(finish=floored)),
        Mutant("rounded_up", ("rounding_bias", "odd", "bound"), fused(finish=raised)),
        Mutant("sum_rounded_down", ("odd", "stored_sum", "bound"), plain(store=floored)),
        Mutant("row_0_for_all", ("row_permutation", "bound"),
               fused(mean=fault.after(_square, fault.first_row))),
        Mutant("row_before", ("row_permutation", "bound"),
               fused(mean=fault.after(_square, fault.previous_row))),
        Mutant("row_index_cut", ("row_permutation", "bound"),
               fused(mean=fault.after(_square, fault.repeated_rows(4)))),
        Mutant("no_eps", ("zero_rows", "bound"), fused(root=fault.without_eps)),
        Mutant("eps_in_float16", ("zero_rows", "bound"), fused(root=fault.eps_in_half)),
        Mutant("tiny_added", ("zero_rows",), fused(finish=lambda y, d: (y + 1e-4).to(d))),
        Mutant("outputs_swapped", ("bound",),
               lambda x, r, w, eps=1e-6: plain()(x, r, w, eps)[::-1]),
        Mutant("other_gain", ("bound",), fused(gain=other)),
    )  # fmt: skip


def fused_add_proof(op: str, mutates: tuple[str, ...], gain: Gain = fault.plain) -> Proof:
    """The proof, for the op that returns its outputs or the one that writes its inputs."""
    right = fused_add(rms(gain=gain))
    vectors = tuple(VECTORS)
    generic = mutating_mutants(right, (0, 1)) if mutates else generic_mutants(right)
    return Proof(
        op=op,
        arguments=("x", "residual", "weight", "eps"),
        shapes=_norms.shapes(ROWS, vectors),
        draw=_norms.strategy(op, ROWS, VECTORS, mutates),
        axes=_norms.AXES,
        row=_norms.row(op, ROWS, VECTORS, mutates),
        zero=_norms.zero(op, ROWS, vectors),
        classes=_norms.classes(op, ROWS, vectors),
        named=_norms.named(op, ROWS, vectors, mutates),
        oracle=oracle,
        laws=LAWS,
        mutants=(*_mutants(gain), *generic, *batch_mutants(right, (0, 1))),
        mutates=mutates,
    )
