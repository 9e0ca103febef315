"""Which backend may serve a pair of calls that one op computes. It knows no graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch_ops import inlining, policy, selector
from torch_ops.errors import TorchOpsError, listing
from torch_ops.platform import Platform

__all__ = ["ADD", "PASSES", "Pass", "serving"]

ADD = "add"
"""Stands for PyTorch's own sum of two tensors, where a pass names an op."""


@dataclass(frozen=True)
class Pass:
    """What stands in place of what.

    Attributes:
        fused: The op that computes both, and the pass's name.
        first: The op of which the second one takes a result; ``"add"`` is PyTorch's own sum.
        second: The op of the second call.
        result: Which result of the first one.
        exact: Backends whose kernel of ``fused`` gives the bits of their other two; None is all,
            as the op's contract says.
        absent: Why ``fused`` doesn't take None for what the second one does.
    """

    fused: str
    first: str
    second: str
    result: int = 0
    exact: tuple[str, ...] | None = None
    absent: str = ""


_COMPUTED = "one that is computed needs all rows before the first code: they are read twice"
_NORMS_AND_GATES = ("fused_add_rms_norm", "rms_norm", "silu_and_mul")
_QUANTIZED = {
    "quant_fp8": "quantize_fp8_per_token",
    "quant_fp8_per_group": "quantize_fp8_per_group",
    "quant_fp8_per_tensor": "quantize_fp8_per_tensor",
}


def _quantizations() -> Iterator[Pass]:
    for suffix, second in _QUANTIZED.items():
        absent = _COMPUTED if second == "quantize_fp8_per_tensor" else ""
        for first in _NORMS_AND_GATES:
            yield Pass(f"{first}_{suffix}", first, second, absent=absent)


PASSES = {
    found.fused: found
    for found in (
        Pass("fused_add_rms_norm", ADD, "rms_norm", exact=("torch", "inductor", "triton")),
        *_quantizations(),
        Pass("apply_rope_append_paged_kv_", "apply_rope", "append_paged_kv_", 1),
    )
}


def serving(
    found: Pass,
    platform: Platform,
    asked: tuple[str | None, ...],
    calls: Sequence[Sequence[Any] | None] | None = None,
) -> tuple[str | None, str]:
    """Give the backend that runs both calls and serves the fused op, empty for the policy's own.

    Args:
        found: The pass.
        platform: Where they run.
        asked: The backend that each of the calls names.
        calls: Their arguments and those of the fused call; None is all calls.

    Returns:
        The backend and its name, or None and why there is none.
    """
    if len(set(asked)) > 1:
        names = " and ".join("none" if name is None else repr(name) for name in asked)
        return None, f"the calls name different backends: {names}"
    parts = [found.second] if found.first == ADD else [found.first, found.second]
    calls = calls or [None] * (len(parts) + 1)
    try:
        chosen = [
            _backends(op, platform, args, name)
            for op, args, name in zip(parts, calls, asked, strict=False)
        ]
        own = _backends(found.fused, platform, calls[-1], asked[0])
    except TorchOpsError as error:
        return None, str(error).partition("\n")[0]
    one = set().union(*chosen)
    if len(one) > 1:
        several = "; ".join(
            f"{op} runs on {listing(sorted(names))}"
            for op, names in zip(parts, chosen, strict=True)
        )
        return None, f"not one backend: {several}"
    (backend,) = one
    if found.exact is not None and backend not in found.exact:
        return None, f"backend {backend!r} may give other bits (accepted: {listing(found.exact)})"
    return _asked_of_fused(found, platform, backend, asked[0], own)


def _asked_of_fused(
    found: Pass, platform: Platform, backend: str, asked: str | None, own: set[str]
) -> tuple[str | None, str]:
    scope = policy.current_scope()
    if own != {backend} and policy.choose(found.fused, scope).backend is not None:
        source = policy.choose(found.fused, scope).source
        return None, f"{source} chose {listing(sorted(own))} for {found.fused}, not {backend!r}"
    try:
        selector.make_plan(found.fused, platform, backend=backend, scope=scope)
    except TorchOpsError as error:
        return None, f"backend {backend!r} of the calls: {str(error).partition(chr(10))[0]}"
    keep = asked is None and own == {backend}
    return ("" if keep else backend), f"backend {backend!r}"


def _backends(
    op: str, platform: Platform, args: Sequence[Any] | None, backend: str | None
) -> set[str]:
    """Give what a call may run on first: several where a table decides and sizes vary."""
    scope = policy.current_scope()
    plans = [
        selector.make_plan(op, platform, backend=backend, scope=scope, row=row)
        for row in inlining.rows_for(op, platform, args, backend)
    ]
    return {plan.specs[0].backend.value for plan in plans}
