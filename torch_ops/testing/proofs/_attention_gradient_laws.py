"""Laws of the gradients of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.laws import in_range, negated, safe_exponents, scaled_pair, twice
from torch_ops.testing.proof import Law, Pair, Trial
from torch_ops.testing.proofs._attention import visible
from torch_ops.testing.proofs._attention_gradients import GIVEN, gradient_of, left

_NAMES = tuple(f"grad_{name}" for name in GIVEN)


def _pairs(what: str, got: Sequence[Tensor], expected: Sequence[Tensor]) -> list[Pair]:
    return [Pair(f"{name}, {what}", a, b) for name, a, b in zip(_NAMES, got, expected, strict=True)]


def _again(trial: Trial, **changes: Tensor) -> tuple[Tensor, ...]:
    """Run with other queries, keys or values, and what forward leaves for them."""
    return trial.run(**changes, **left({**trial.args, **changes}))


def _safe(trial: Trial, *names: str) -> bool:
    tensors = [trial.args[n] for n in names if trial.args[n] is not None]
    return all(in_range(t, *safe_exponents(t.dtype)) for t in tensors)


def _scaled_grads(trial: Trial) -> Sequence[Pair] | None:
    if not _safe(trial, "grad", "grad_lse", "v"):
        return None
    changes = {n: trial.args[n] * 8 for n in ("grad", "grad_lse") if trial.args[n] is not None}
    return [
        scaled_pair(f"{name}, gradients times 8", a, b, 3)
        for name, a, b in zip(_NAMES, trial.run(**changes), trial.outputs, strict=True)
    ]


def _zero_grads(trial: Trial) -> Sequence[Pair] | None:
    if not all(bool(trial.args[n].isfinite().all()) for n in GIVEN):
        return None
    got = trial.run(grad=torch.zeros_like(trial.args["grad"]), grad_lse=None)
    return _pairs("gradients of zero", got, [torch.zeros_like(t) for t in got])


def _negated_logits(trial: Trial) -> Sequence[Pair]:
    grad_q, grad_k, grad_v = trial.outputs
    got = _again(trial, q=-trial.args["q"], k=-trial.args["k"])
    return _pairs("q and k negated", got, (-grad_q, -grad_k, grad_v))


def _moved_scale(trial: Trial) -> Sequence[Pair] | None:
    if not _safe(trial, "q", "k", "grad", "grad_lse", "v"):
        return None
    got = _again(trial, q=trial.args["q"] * 8, k=trial.args["k"] / 8)
    return [
        scaled_pair(f"{name}, 8 q and k / 8", a, b, power)
        for name, a, b, power in zip(_NAMES, got, trial.outputs, (-3, 3, 0), strict=True)
    ]


def _seen(trial: Trial) -> Tensor:
    queries, keys = trial.args["q"].shape[1], trial.args["k"].shape[1]
    return visible(queries, keys, trial.args["is_causal"], trial.args["window_left"])


def _unseen_keys(trial: Trial) -> Sequence[Pair] | None:
    hidden = ~_seen(trial).any(0)
    if not bool(hidden.any()) or not all(bool(o.isfinite().all()) for o in trial.outputs):
        return None
    found = [output[:, hidden.to(output.device)] for output in trial.outputs[1:]]
    return [
        Pair(f"{name} of keys that nothing attends to", part, torch.zeros_like(part))
        for name, part in zip(_NAMES[1:], found, strict=True)
    ]


def _later_keys(trial: Trial) -> Sequence[Pair] | None:
    """Finite garbage at keys that half of the queries don't attend to."""
    k, v, seen = trial.args["k"], trial.args["v"], _seen(trial)
    if not bool(k.isfinite().all() and v.isfinite().all()):
        return None
    half = (seen.shape[0] + 1) // 2
    for rows in (slice(0, half), slice(half, None)):
        hidden = ~seen[rows].any(0)
        if len(seen[rows]) and bool(hidden.any()):
            where = hidden.view(1, -1, 1, 1).to(k.device)
            changes = {"k": torch.where(where, 3.0, k), "v": torch.where(where, -7.0, v)}
            got, base = _again(trial, **changes)[0], trial.outputs[0]
            return [Pair("grad_q, keys it can't see changed", got[:, rows], base[:, rows])]
    return None


def _lone_rows(trial: Trial) -> Sequence[Pair] | None:
    """Rows of grad_q come of their own gradients alone."""
    grad, rows = trial.args["grad"], trial.args["grad_lse"]
    half = grad.shape[1] // 2
    if not half or not bool(grad.isfinite().all()):
        return None
    changes: dict[str, Any] = {"grad": torch.cat([grad[:, :half] * 0 + 1, grad[:, half:]], 1)}
    if rows is not None:
        changes["grad_lse"] = torch.cat([rows[:, :half] * 0 + 1, rows[:, half:]], 1)
    got, base = trial.run(**changes)[0], trial.outputs[0]
    return [Pair("grad_q, gradients of other queries changed", got[:, half:], base[:, half:])]


def _swapped(trial: Trial) -> Sequence[Pair] | None:
    """Key heads reversed, with their groups of query heads, and sequences: within twice the bound.

    A batched product may treat its last matrices otherwise.
    """
    kv_heads = trial.args["k"].shape[2]
    if kv_heads < 2 and trial.args["k"].shape[0] < 2:
        return None

    def turned(x: Tensor) -> Tensor:
        groups: Tensor = x.unflatten(2, (kv_heads, -1))
        return groups.flip(0, 2).flatten(2, 3).contiguous()

    names = [n for n, a in trial.args.items() if isinstance(a, Tensor)]
    changes = {n: turned(trial.args[n]) for n in names}
    expected = gradient_of({**trial.args, **changes})(trial.contract)
    return [
        Pair(f"{e.name}, heads and sequences reversed", a, turned(b), twice(e.bound))
        for e, a, b in zip(expected, trial.run(**changes), trial.outputs, strict=True)
    ]


LAWS = (
    negated("negated_grads", ("grad", "grad_lse"), (-1, -1, -1), "f(-grads) == -f(grads)"),
    Law("scaled_grads", "f(8 grads) == 8 f(grads)", _scaled_grads),
    Law("zero_grads", "f(0) == 0", _zero_grads),
    Law("negated_logits", "f(-q, -k) == (-dq, -dk, dv)", _negated_logits),
    Law("moved_scale", "f(8 q, k / 8) == (dq / 8, 8 dk, dv)", _moved_scale),
    Law("unseen_keys", "a key that no query attends to has no gradient", _unseen_keys),
    Law("later_keys", "grad_q doesn't depend on keys that a query can't see", _later_keys),
    Law("lone_rows", "queries don't know each other's gradients", _lone_rows),
    Law("swapped", "heads and sequences don't know each other", _swapped),
)
