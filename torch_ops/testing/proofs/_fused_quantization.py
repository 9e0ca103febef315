"""An op that quantizes what another op gives: Specs, oracle and laws, shared by norms and gates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_ops.declarations import catalogue
from torch_ops.declarations._quantization import AMAX_FLOOR, fp8_of, largest
from torch_ops.testing.arithmetic import contract_field, overflow_threshold
from torch_ops.testing.laws import alone
from torch_ops.testing.proof import Arguments, Law, Output, Pair, Shapes, Trial
from torch_ops.testing.proofs._quantization import (
    SCALES,
    SIZES,
    U32,
    Form,
    exact_scale,
    nearest,
)
from torch_ops.testing.spec import Operand, Spec

Oracle = Callable[[Arguments, Any], tuple[Output, ...]]
ROWS = Form("quantize_fp8_per_token", "token")
GROUPS = Form("quantize_fp8_per_group", "group")
GIVEN = Form("quantize_fp8_per_tensor", "tensor")


@dataclass(frozen=True)
class Fused:
    """An op that stands for two.

    Attributes:
        op: The op's name.
        before: The first of the two.
        form: The second; where all share a scale, it is given.
        rows: Arguments that are rows.
        odd: Whether the first one gives ``f(-x) == -f(x)``.
    """

    op: str
    before: str
    form: Form
    rows: tuple[str, ...]
    odd: bool

    @property
    def given(self) -> bool:
        """Whether the scale is an argument."""
        return self.form.per == "tensor"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the op's arguments in order."""
        return tuple(catalogue()[self.op].signature.parameters)

    def more(self, args: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the quantization takes beside its input."""
        return tuple(args[name] for name in self.form.arguments[1:])

    def shapes(self, before: Callable[[Spec], Shapes]) -> Callable[[Spec], Shapes]:
        """Shapes of all tensors, given those of the op before."""
        return lambda spec: before(spec) | ({"scale": (1,)} if self.given else {})

    def spec(self, before: Spec) -> Spec:
        """A call of the op before, with what the quantization takes, by its sizes and its seed."""
        width = before.dim.get("hidden", before.dim.get("half", 0))
        turn = before.seed and before.seed + sum(before.dim.values()) - width
        if self.given:
            scale = Operand("float32", "contig", SCALES[turn % len(SCALES)])
            return before.replace(operands=before.operand | {"scale": scale})
        if self.form.per == "group":
            sizes = [size for size in SIZES if width % size == 0]
            size = max(width, 1) if turn % 4 == 3 else sizes[turn // 4 % len(sizes)]
            return before.replace(params=before.param | {"group_size": size})
        return before


def fused_oracle(fused: Fused, oracle: Oracle) -> Oracle:
    """What a quantization gives of a value that is known within a bound.

    Its largest magnitude is known within the largest bound of what shares a scale. Given the
    scale, a code is one of those between the nearest ones to both ends of what the value may be,
    divided.
    """
    form = fused.form

    def outputs(args: Arguments, contract: Any) -> tuple[Output, ...]:
        contract_field(contract, "quantized", "rounded")
        contract_field(contract, "per", form.per)
        value, *rest = oracle(args, catalogue()[fused.before].contract)
        assert value.bound is not None
        dtype, shape = fp8_of(args["x"]), value.value.shape
        y, slack = (form.split(part, args) for part in (value.value, value.bound))
        broken = ~(y.abs() + slack < overflow_threshold(value.dtype))
        undefined = broken if fused.given else broken.any(-1, keepdim=True)
        y, slack = (torch.where(undefined, 0.0, part) for part in (y, slack))

        def codes(found: Tensor, more: Tensor) -> Output:
            d = 4 * U32
            ends = [
                nearest((y + side * (slack + d * (y.abs() + slack))) / found, dtype)
                for side in (-1, 1)
            ]
            half = torch.where(undefined, torch.inf, (ends[1] - ends[0]) / 2 + more)
            middle = (ends[0] + ends[1]) / 2
            return Output("q", middle.reshape(shape), half.reshape(shape), dtype)

        if fused.given:
            fixed = args["scale"].reshape(1)
            q = codes(fixed.double(), torch.zeros(1, dtype=torch.float64))
            return q, Output("scale", fixed, None, torch.float32), *rest
        size = slack.amax(-1, keepdim=True) if slack.shape[-1] else slack.new_zeros(len(slack), 1)
        scale = exact_scale(y, dtype)
        spread = size / largest(dtype) + 2 * U32 * (scale + size)

        def given(made: tuple[Tensor, ...]) -> Output:
            found = torch.where(undefined, scale, made[1].double().reshape(scale.shape))
            return codes(found, torch.zeros_like(found))

        q = replace(codes(scale, largest(dtype) / 8 + 0 * scale), given=given)
        spread = torch.where(undefined, torch.inf, spread)
        wanted = form.scales(value.value, args)
        return q, _scale(scale.reshape(wanted), spread.reshape(wanted)), *rest

    return outputs


def _scale(value: Tensor, bound: Tensor) -> Output:
    return Output("scale", value, bound, torch.float32)


def laws(fused: Fused) -> tuple[Law, ...]:
    """The laws of quantizing what another op gives."""
    form, before, rows = fused.form, fused.before, fused.rows

    def composed(trial: Trial) -> Sequence[Pair]:
        known = catalogue()[before].signature.parameters
        made = trial.other(before, *(trial.args[name] for name in known))
        first, *rest = (made,) if isinstance(made, Tensor) else made
        wanted = (*trial.other(form.op, first, *fused.more(trial.args)), *rest)
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
        kept = Pair("scale of zeros", scale, floor, 3 * U32 * floor.double())
        if fused.given:
            kept = Pair("the scale that was given", scale, trial.args["scale"].reshape(1))
        return [Pair("q of zeros", q.float(), torch.zeros_like(q, dtype=torch.float32)), kept]

    floor = "the scale that is given" if fused.given else "the scale of the floor"
    return (
        Law("composed", f"f == {form.op} of {before}", composed),
        Law("zeros", f"q(0) == 0, with {floor}", zeros),
        *(() if fused.given else (_top(form),)),
        alone(rows),
        *((Law("negated", "q(-x) == -q(x), with the same scale", negated),) if fused.odd else ()),
    )


def _top(form: Form) -> Law:
    def top(trial: Trial) -> Sequence[Pair] | None:
        q, scale = trial.outputs[0], trial.expected[1]
        limit = largest(q.dtype)
        assert scale.bound is not None
        known = (scale.value - scale.bound > 2 * AMAX_FLOOR / limit).reshape(-1).to(q.device)
        if not bool(known.any()):
            return None
        found = form.split(q.float(), trial.args).abs().amax(-1)[known]
        return [Pair("the largest code", found, torch.full_like(found, limit))]

    return Law("top", f"the largest of a {_shared(form)} gets the largest code", top)


def _shared(form: Form) -> str:
    return "row" if form.per == "token" else form.per
