"""Proofs of norms and gates that are quantized at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional

from torch_ops.testing.proof import Proof
from torch_ops.testing.proofs import _fused_add, _gates, _norms
from torch_ops.testing.proofs import _norm_faults as fault
from torch_ops.testing.proofs._fused_faults import mutants
from torch_ops.testing.proofs._fused_quantization import Fused, Oracle, fused_oracle, laws
from torch_ops.testing.proofs._gate_faults import gate
from torch_ops.testing.proofs._quantization import Form
from torch_ops.testing.proofs.rms_norm import oracle as norm_oracle
from torch_ops.testing.spec import Spec

VECTORS = {"weight": False}
Wrong = Callable[..., Any]


def norm_proof(op: str, form: Form) -> Proof:
    """The proof of quantizing what rms_norm gives."""
    fused = Fused(op, "rms_norm", form, ("x",), odd=True)
    return _normed(fused, norm_oracle, _wrong_norm, _wide_norm)


def added_norm_proof(op: str, form: Form) -> Proof:
    """The proof of quantizing what fused_add_rms_norm gives."""
    fused = Fused(op, "fused_add_rms_norm", form, ("x", "residual"), odd=True)
    wrong = fault.fused_add(exact=True, norm=_wrong_norm)
    return _normed(fused, _fused_add.oracle, wrong, _wide_added)


def gate_proof(op: str, form: Form) -> Proof:
    """The proof of quantizing what silu_and_mul gives."""
    fused = Fused(op, "silu_and_mul", form, ("x",), odd=False)
    wide = gate(functional.silu, finish=lambda y, _: y)
    bare = Proof(
        op=op,
        arguments=fused.arguments,
        shapes=_gates.shapes,
        draw=_gates.strategy(op),
        axes=_gates.AXES,
        row=_gates.row(op),
        zero=_gates.zero(op),
        classes=_gates.classes(op),
        named=_gates.named(op),
        oracle=fused_oracle(fused, _gates.oracle),
        laws=laws(fused),
        mutants=mutants(fused, gate(functional.gelu), wide),
    )
    return _quantized(fused, bare)


_wrong_norm = fault.rms(root=fault.with_eps(lambda _: 1e-2))


def _wide_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """An rms norm of rows that isn't rounded to their dtype."""
    return fault.rms(finish=lambda y, _: y)(x, weight, eps)


def _wide_added(x: Tensor, r: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    stored = _fused_add.total(x, r)
    return _wide_norm(stored, weight, eps), stored


def _normed(fused: Fused, oracle: Oracle, wrong: Wrong, wide: Wrong) -> Proof:
    op, rows, vectors = fused.op, fused.rows, tuple(VECTORS)
    bare = Proof(
        op=op,
        arguments=fused.arguments,
        shapes=_norms.shapes(rows, vectors),
        draw=_norms.strategy(op, rows, VECTORS),
        axes=_norms.AXES,
        row=_norms.row(op, rows, VECTORS),
        zero=_norms.zero(op, rows, vectors),
        classes=_norms.classes(op, rows, vectors),
        named=_norms.named(op, rows, vectors),
        oracle=fused_oracle(fused, oracle),
        laws=laws(fused),
        mutants=mutants(fused, wrong, wide),
    )
    return _quantized(fused, bare)


def _quantized(fused: Fused, bare: Proof) -> Proof:
    """The proof with calls of the op before that have got a group size or a scale."""

    def each(make: Callable[[str], list[Spec]]) -> Callable[[str], list[Spec]]:
        return lambda dtype: [fused.spec(spec) for spec in make(dtype)]

    def named(dtype: str) -> dict[str, Spec]:
        return {name: fused.spec(spec) for name, spec in bare.named(dtype).items()}

    return replace(
        bare,
        shapes=fused.shapes(bare.shapes),
        draw=lambda dtype, budget: bare.draw(dtype, budget).map(fused.spec),
        row=lambda dtype, choice: fused.spec(bare.row(dtype, choice)),
        zero=each(bare.zero),
        classes=each(bare.classes),
        named=named,
        cost=24,
    )
