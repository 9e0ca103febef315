"""Bounds are read from the contract and are tight enough to tell one policy from another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from torch_ops.contracts import (
    AttentionContract,
    Contract,
    GateContract,
    MergeContract,
    NormContract,
    RopeContract,
)
from torch_ops.testing import Spec, proof_of
from torch_ops.testing.compare import ViolationError
from torch_ops.testing.examine import Examiner, Tally
from torch_ops.testing.faults import truncated
from torch_ops.testing.proofs import _norm_faults as norm
from torch_ops.testing.proofs._attention_faults import attention, only_out
from torch_ops.testing.proofs._gate_faults import gate
from torch_ops.testing.search import covering_rows
from torch_ops.testing.subject import subject_of


def _cast_then_multiply(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Rounds the normalized row, then the product."""
    rounded = norm.rms()(x, None, eps)
    if weight is None:
        return rounded
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return (rounded.to(wide) * weight.to(wide)).to(x.dtype)


def _rounded_silu(x: Tensor) -> Tensor:
    return gate(lambda g: functional.silu(g).to(x.dtype).to(g.dtype))(x)


def _low_p(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    def softmax(s: Tensor, seen: Tensor) -> Tensor:
        top = s.amax(-1, keepdim=True).clamp(min=-1e30) if s.shape[-1] else s
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        return p.to(dtype).to(s.dtype) / total.masked_fill(total == 0, 1.0)

    return softmax


def _rounds_p(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return only_out(attention(softmax=_low_p(q.dtype)))(q, k, v, *rest)


def worst(op: str, kernel: Callable[..., Any], contract: Contract) -> float:
    """The largest error by its bound over the covering array; infinite past the bound."""
    examiner = Examiner(subject_of(kernel), proof_of(op), contract, only={"bound"})
    tally = Tally()
    for spec in covering_rows(op):
        try:
            examiner(spec, tally, with_laws=False)
        except ViolationError:
            return float("inf")
    return tally.ratio


FUSED = NormContract(residual="norm_of_rounded")
ATTENTION = AttentionContract(p_dtype="float32")
CASES: list[tuple[str, Callable[..., Any], Callable[..., Any], Contract, dict[str, str]]] = [
    ("rms_norm", norm.rms(), _cast_then_multiply, NormContract(),
     {"weight_mul": "cast_then_mul"}),
    ("fused_add_rms_norm", norm.fused_add(), norm.fused_add(exact=True), FUSED,
     {"residual": "norm_of_exact"}),
    ("silu_and_mul", gate(functional.silu), _rounded_silu, GateContract(),
     {"rounding": "activation_first"}),
    ("attention", only_out(attention()), _rounds_p, ATTENTION, {"p_dtype": "input"}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "strict", "loose", "contract", "other"), CASES)
def test_the_bound_tells_policies_apart(
    op: str, strict: Callable[..., Any], loose: Callable[..., Any], contract: Any,
    other: dict[str, str],
) -> None:  # fmt: skip
    relaxed = dataclasses.replace(contract, **other)
    assert worst(op, strict, contract) <= 1
    assert worst(op, loose, contract) == float("inf")
    assert worst(op, loose, relaxed) <= 1


def test_a_truncated_output_fails_where_p_is_not_rounded() -> None:
    kernel = only_out(attention(finish=truncated))
    assert worst("attention", kernel, ATTENTION) == float("inf")


@pytest.mark.parametrize(
    ("op", "contract"),
    [
        ("rms_norm", NormContract(weight_mul="odd")),  # type: ignore[arg-type]
        ("fused_add_rms_norm", NormContract(residual=None)),
        ("silu_and_mul", GateContract(activation="odd")),  # type: ignore[arg-type]
        ("silu_and_mul", GateContract(rounding="odd")),  # type: ignore[arg-type]
        ("apply_rope", RopeContract(arithmetic="odd")),  # type: ignore[arg-type]
        ("attention", AttentionContract(causal="odd")),  # type: ignore[arg-type]
        ("attention", AttentionContract(p_dtype="odd")),  # type: ignore[arg-type]
        ("merge_state", MergeContract(empty_row="odd")),  # type: ignore[arg-type]
        ("merge_state", Contract()),
    ],
)
def test_a_policy_without_a_bound_is_an_error(op: str, contract: Contract) -> None:
    spec = covering_rows(op)[0]
    with pytest.raises(LookupError, match="contract"):
        _oracle(spec, contract)


def _oracle(spec: Spec, contract: Contract) -> None:
    from torch_ops.testing import build
    from torch_ops.testing.arguments import contiguous

    proof_of(spec.op).oracle(contiguous(build(spec)), contract)
