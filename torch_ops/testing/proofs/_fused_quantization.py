"""Proof of an op that quantizes by rows what another op gives: shared by norms and gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_ops.declarations import catalogue
from torch_ops.declarations._quantization import AMAX_FLOOR, encode, fp8_of, largest
from torch_ops.testing.arithmetic import contract_field, overflow_threshold
from torch_ops.testing.batch_faults import batch_mutants
from torch_ops.testing.faults import generic_mutants
from torch_ops.testing.laws import alone
from torch_ops.testing.proof import Arguments, Law, Mutant, Output, Pair, Trial
from torch_ops.testing.proofs._quantization import U32, Form, exact_scale, nearest
from torch_ops.testing.proofs._quantization_faults import (
    amax,
    no_last,
    power_of_two,
    quantizer,
    scale_of,
)

Oracle = Callable[[Arguments, Any], tuple[Output, ...]]
Kernel = Callable[..., Any]
ROWS = Form("quantize_fp8_per_token", "token")


def fused_oracle(before: str, oracle: Oracle) -> Oracle:
    """What a quantization gives of a value that is known within a bound.

    Its largest magnitude is known within the largest bound of the row. Given the scale, a code is
    one of those between the nearest ones to both ends of what the value may be, divided.
    """

    def outputs(args: Arguments, contract: Any) -> tuple[Output, ...]:
        contract_field(contract, "quantized", "rounded")
        value, *rest = oracle(args, catalogue()[before].contract)
        assert value.bound is not None
        dtype = fp8_of(args["x"])
        y, slack = value.value, value.bound
        broken = ~(y.abs() + slack < overflow_threshold(value.dtype))
        undefined = broken.any(-1, keepdim=True)
        y, slack = (torch.where(undefined, 0.0, part) for part in (y, slack))
        shape = (*y.shape[:-1], 1)
        size = slack.amax(-1, keepdim=True) if slack.shape[-1] else slack.new_zeros(shape)
        scale = exact_scale(y, dtype)
        spread = size / largest(dtype) + 2 * U32 * (scale + size)

        def codes(found: Tensor, more: Tensor) -> Output:
            d = 4 * U32
            ends = [
                nearest((y + side * (slack + d * (y.abs() + slack))) / found, dtype)
                for side in (-1, 1)
            ]
            half = torch.where(undefined, torch.inf, (ends[1] - ends[0]) / 2 + more)
            return Output("q", (ends[0] + ends[1]) / 2, half, dtype)

        def given(made: tuple[Tensor, ...]) -> Output:
            found = torch.where(undefined, scale, made[1].double())
            return codes(found, torch.zeros_like(found))

        q = replace(codes(scale, largest(dtype) / 8 + 0 * scale), given=given)
        spread = torch.where(undefined, torch.inf, spread)
        return q, Output("scale", scale, spread, torch.float32), *rest

    return outputs


def laws(before: str, rows: Sequence[str], *, odd: bool) -> tuple[Law, ...]:
    """The laws of quantizing what another op gives."""

    def composed(trial: Trial) -> Sequence[Pair]:
        made = trial.other(before, *trial.args.values())
        first, *rest = (made,) if isinstance(made, Tensor) else made
        wanted = (*trial.other(ROWS.op, first), *rest)
        return [
            Pair(f"output {i}, of one op and of two", a, b)
            for i, (a, b) in enumerate(zip(trial.outputs, wanted, strict=True))
        ]

    def negated(trial: Trial) -> Sequence[Pair]:
        q, scale, *_ = trial.run(**{name: -trial.args[name] for name in rows})
        return [
            Pair(f"q, {', '.join(rows)} negated", q.float(), -trial.outputs[0].float()),
            Pair("the scale of that", scale, trial.outputs[1]),
        ]

    def zeros(trial: Trial) -> Sequence[Pair]:
        q, scale, *_ = trial.run(**{name: torch.zeros_like(trial.args[name]) for name in rows})
        floor = torch.full_like(scale, AMAX_FLOOR / largest(q.dtype))
        return [
            Pair("q of zeros", q.float(), torch.zeros_like(q, dtype=torch.float32)),
            Pair("scale of zeros", scale, floor, 3 * U32 * floor.double()),
        ]

    def top(trial: Trial) -> Sequence[Pair] | None:
        q, scale = trial.outputs[0].float(), trial.expected[1]
        floor = AMAX_FLOOR / largest(trial.outputs[0].dtype)
        assert scale.bound is not None
        known = (scale.value - scale.bound > 2 * floor).squeeze(-1).to(q.device)
        if not bool(known.any()):
            return None
        found = q.abs().amax(-1)[known]
        return [
            Pair("the largest code", found, torch.full_like(found, largest(trial.outputs[0].dtype)))
        ]

    return (
        Law("composed", f"f == {ROWS.op} of {before}", composed),
        Law("zeros", "q(0) == 0, with the scale of the floor", zeros),
        Law("top", "the largest of a row gets the largest code", top),
        alone(tuple(rows)),
        *((Law("negated", "q(-x) == -q(x), with the same scale", negated),) if odd else ()),
    )


def mutants(
    kernel: Kernel, wrong: Kernel, wide: Kernel, rows: Sequence[int], *, odd: bool
) -> tuple[Mutant, ...]:
    """Planted faults.

    Args:
        kernel: The op before, right.
        wrong: The op before, wrong beyond its bound.
        wide: The op before with a first result that isn't rounded.
        rows: Places of the arguments that are rows.
        odd: Whether the law of negation holds.
    """

    def fused(before: Kernel, **pieces: Any) -> Kernel:
        def call(*args: Any) -> Any:
            made = before(*args)
            first, *rest = (made,) if isinstance(made, Tensor) else made
            return (*quantizer(ROWS, **pieces)(first), *rest)

        return call

    def fault(name: str, *kills: str, **pieces: Any) -> Mutant:
        known = tuple(kill for kill in kills if odd or kill != "negated")
        return Mutant(name, known, fused(kernel, **pieces))

    plain = fused(kernel)
    return (
        Mutant("not_rounded_before", ("composed",), fused(wide)),
        Mutant("before_is_wrong", ("composed", "bound"), fused(wrong)),
        fault("limit_too_small", "composed", "bound", "top",
              scale=lambda a, limit: scale_of(a, limit * 0.53)),
        fault("scale_of_all", "composed", "bound", "top",
              size=lambda g: amax(g).amax().expand(g.shape[0], 1) if g.numel() else amax(g)),
        fault("mean_magnitude", "bound", "top",
              size=lambda g: g.abs().mean(-1, keepdim=True) * 2 if g.shape[1] else amax(g)),
        fault("power_of_two", "bound", "composed", scale=power_of_two),
        fault("last_element_dropped", "bound", size=no_last),
        fault("no_floor", "zeros", scale=lambda a, limit: a / limit),
        fault("floor_of_scale", "zeros", scale=lambda a, limit: (a / limit).clamp(min=AMAX_FLOOR)),
        fault("one_for_zeros", "zeros",
              scale=lambda a, limit: torch.where(a > 0, scale_of(a, limit), torch.ones_like(a))),
        fault("sign_ignored", "negated", "bound", codes=lambda v, s, d: encode(v.abs(), s, d)),
        fault("negative_clipped", "negated", "bound",
              codes=lambda v, s, d: encode(v.clamp(min=-1e-2), s, d)),
        fault("largest_without_sign", "negated", "bound",
              size=lambda g: g.amax(-1, keepdim=True).clamp(min=0) if g.shape[1] else amax(g)),
        *generic_mutants(plain),
        *batch_mutants(plain, rows),
    )  # fmt: skip
