"""Laws of quantizations. They see codes as numbers, in groups that share a scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.declarations._quantization import AMAX_FLOOR, largest
from torch_ops.testing.laws import alone, permuted_rows
from torch_ops.testing.proof import Law, Pair, Trial
from torch_ops.testing.proofs._quantization import U32, Form

Pairs = Sequence[Pair] | None


def positive_codes(dtype: torch.dtype) -> Tensor:
    """All codes from 0 to the largest, as float64, in the order of their bits."""
    bits = torch.arange(128, dtype=torch.int8)
    return bits[: int((bits.view(dtype).double() <= largest(dtype)).sum())].view(dtype).double()


def laws(form: Form) -> tuple[Law, ...]:
    """The laws of a form."""

    def law(name: str, statement: str, pairs: Callable[[Form, Trial], Pairs]) -> Law:
        return Law(name, statement, lambda trial: pairs(form, trial))

    rows = () if form.per == "tensor" else (alone(("x",)),)
    return (
        law("negated", "q(-x) == -q(x), with the same scale", _negated),
        law("scaled", "q(8 x) == q(x), with 8 times the scale", _scaled),
        law("idempotent", "q of codes times a power of two gives these codes", _idempotent),
        law("ties_to_even", "between two codes the even one is taken", _ties),
        law("monotone", "x <= y: q(x) <= q(y)", _monotone),
        law("zeros", "q(0) == 0, with the scale of the floor", _zeros),
        law("isolated", "NaN changes nothing that doesn't share its scale", _isolated),
        permuted_rows(("x",), "q(P x) == P q(x)"),
        *rows,
        *(() if form.per == "tensor" else (law("top", "the largest gets the largest code", _top),)),
    )


def _groups(form: Form, trial: Trial, value: Tensor) -> Tensor:
    return form.split(value, trial.args).float()


def _run(form: Form, trial: Trial, groups: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """Codes as numbers ``[groups, elements]``, and scales ``[groups, 1]``, of another x."""
    x = trial.args["x"]
    q, scale = trial.run(x=groups.to(x.dtype).reshape(x.shape), **more)
    return _groups(form, trial, q), scale.reshape(-1, 1)


def _fixed(trial: Trial, value: float) -> dict[str, Tensor]:
    """A given scale of this value, where one is given."""
    scale = trial.args.get("scale")
    return {} if scale is None else {"scale": torch.full_like(scale, value)}


def _negated(form: Form, trial: Trial) -> Pairs:
    q, scale = trial.run(x=-trial.args["x"])
    return [
        Pair("q, x negated", q.float(), -trial.outputs[0].float()),
        Pair("scale, x negated", scale, trial.outputs[1]),
    ]


def _scaled(form: Form, trial: Trial) -> Pairs:
    x = trial.args["x"]
    groups = form.split(x, trial.args)
    amax = groups.double().abs().amax(-1, keepdim=True)
    fixed = trial.args.get("scale")
    grows = (amax > 0) | (fixed is not None)
    exact = (amax <= torch.finfo(x.dtype).max / 16) & ((amax >= 2 * AMAX_FLOOR) | (amax == 0))
    if not bool(exact.all()):
        return None
    q, scale = trial.run(x=8 * x, **({} if fixed is None else {"scale": 8 * fixed}))
    grown = trial.outputs[1].reshape(-1, 1) * torch.where(grows, 8.0, 1.0)
    return [
        Pair("q, x times 8", q.float(), trial.outputs[0].float()),
        Pair("scale, x times 8", scale, grown.reshape(scale.shape)),
    ]


def _idempotent(form: Form, trial: Trial) -> Pairs:
    """All codes, the largest first, with signs that change from one round to the next."""
    x = trial.args["x"]
    groups = form.split(x, trial.args)
    all_codes = positive_codes(trial.outputs[0].dtype).to(x.device).flip(0)
    place = torch.arange(groups.shape[1], device=x.device)
    sign = 1 - 2 * (place // all_codes.numel()).remainder(2)
    codes = (sign * all_codes[place.remainder(all_codes.numel())]).float().expand(groups.shape)
    q, scale = _run(form, trial, codes / 8, **_fixed(trial, 0.125))
    eighth = torch.full_like(scale, 0.125)
    return [
        Pair(f"q of codes / 8 in {x.dtype}", q, codes),
        Pair("scale of codes / 8", scale, eighth, (2 * U32 * eighth).double()),
    ]


def _ties(form: Form, trial: Trial) -> Pairs:
    x, dtype = trial.args["x"], trial.outputs[0].dtype
    groups = form.split(x, trial.args)
    codes = positive_codes(dtype).to(x.device)
    middle, even = (codes[1:] + codes[:-1]) / 2, torch.stack([codes[:-1], codes[1:]])
    place = torch.arange(groups.shape[1], device=x.device)
    which = (place - 1).remainder(middle.numel())
    sign = 1 - 2 * (place // middle.numel()).remainder(2)
    value, wanted = sign * middle[which], sign * even[which.remainder(2), which]
    value[0] = wanted[0] = codes[-1]
    q, scale = _run(form, trial, value.expand(groups.shape), **_fixed(trial, 1.0))
    plain = (scale == 1).expand(q.shape)  # another one isn't divided by exactly
    if not bool(plain.any()) or groups.shape[1] < 2:
        return None
    return [Pair("q between two codes", q[plain], wanted.float().expand(q.shape)[plain])]


def _monotone(form: Form, trial: Trial) -> Pairs:
    groups = form.split(trial.args["x"], trial.args)
    if not bool(groups.isfinite().all()):
        return None
    q, _ = _run(form, trial, groups.sort(-1).values)
    return [Pair("q of what is sorted", q, q.cummax(-1).values)]


def _zeros(form: Form, trial: Trial) -> Pairs:
    groups = torch.zeros_like(form.split(trial.args["x"], trial.args))
    groups[::2] = form.split(trial.args["x"], trial.args)[::2]
    groups[0] = 0
    q, scale = _run(form, trial, groups)
    empty = (groups == 0).all(-1)
    found = [Pair("q of zeros", q[empty], torch.zeros_like(q[empty]))]
    if trial.args.get("scale") is None:
        floor = torch.full_like(scale[empty], AMAX_FLOOR / largest(trial.outputs[0].dtype))
        found.append(Pair("scale of zeros", scale[empty], floor, 3 * U32 * floor.double()))
    return found


def _isolated(form: Form, trial: Trial) -> Pairs:
    """NaN at the first place, or one infinity; given a scale, it decides about itself alone."""
    groups = form.split(trial.args["x"], trial.args)
    fixed = trial.args.get("scale") is not None
    if groups.numel() < 2 if fixed else groups.shape[0] < 2:
        return None
    found, clean = [], _groups(form, trial, trial.outputs[0])
    for special in (torch.nan, torch.inf):
        changed = groups.clone()
        changed[0, 0] = special
        q, scale = _run(form, trial, changed)
        if fixed:
            found.append(Pair(f"q beside {special}", q[:, 1:], clean[:, 1:]))
        else:
            before = trial.outputs[1].reshape(-1, 1)
            found.append(Pair(f"q in other groups than {special}", q[1:], clean[1:]))
            found.append(Pair(f"scale of other groups than {special}", scale[1:], before[1:]))
    return found


def _top(form: Form, trial: Trial) -> Pairs:
    groups = form.split(trial.args["x"], trial.args).double()
    amax = groups.abs().amax(-1, keepdim=True)
    known = (amax >= 2 * AMAX_FLOOR) & amax.isfinite()
    if not bool(known.any()):
        return None
    q, limit = _groups(form, trial, trial.outputs[0]), largest(trial.outputs[0].dtype)
    ones = (groups.abs() == amax) & known
    return [Pair("q of the largest", q[ones], (limit * groups.sign()[ones]).float())]
