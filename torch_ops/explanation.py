"""`explain`: why this kernel, without running anything. It gives the selector's own verdicts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_ops import buckets, inlining, policy, selector, training, tuning
from torch_ops.backend import Backend
from torch_ops.errors import TorchOpsError, UnknownBackendError
from torch_ops.platform import Platform, platform_of
from torch_ops.registry import registry
from torch_ops.selector import Candidate

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """What would run and why; ``str()`` is a table.

    Attributes:
        op: The op's name.
        chosen: Backend that would run, None where the call would raise.
        source: Who decides: ``"call"``, ``"scope"``, ``"layer"``, ``"process"``,
            ``"environment"``, ``"tuned"`` or ``"declared"``.
        candidates: Every registered kernel in order of preference, with all its reasons.
        platform: Where the call would run.
        error: What the call would raise, None where it would run.
        row: What the device's table says of such calls: their bucket, and times of each kernel.
        table: Which table that is, or why there is no row; empty where there is no table.
        inlining: What becomes of the call in a compiled graph; None where it would raise, without
            arguments, and for an op that isn't declared.
    """

    op: str
    chosen: Backend | None
    source: str
    candidates: tuple[Candidate, ...]
    platform: Platform
    error: Exception | None = None
    row: tuning.Row | None = None
    table: str = ""
    inlining: inlining.Inlining | None = None

    def __str__(self) -> str:
        chosen = self.chosen.value if self.chosen is not None else "none"
        lines = [f"{self.op} on {self.platform}: {chosen} ({self.source})"]
        rows = [
            (
                "->" if candidate.backend is self.chosen else "  ",
                candidate.backend.value,
                "usable" if candidate.usable else "not usable",
                candidate.state,
                self._time(candidate.backend.value),
                "; ".join(candidate.reasons),
            )
            for candidate in self.candidates
        ]
        shown = [i for i in range(5) if i < 4 or self.row is not None]
        widths = {i: max((len(row[i]) for row in rows), default=0) for i in shown}
        lines += [
            "  ".join([*(row[i].ljust(widths[i]) for i in shown), row[5]]).rstrip() for row in rows
        ]
        if self.table:
            lines.append(f"table: {self.table}")
        if self.inlining is not None:
            becomes = "dissolves" if self.inlining.inlined else "stays one call"
            lines.append(f"compiled graphs: it {becomes}: {self.inlining.reason}")
        if self.error is not None:
            lines.append(f"would raise {type(self.error).__name__}: {self.error}")
        return "\n".join(lines)

    def _time(self, backend: str) -> str:
        if self.row is None:
            return ""
        if backend in self.row.us:
            return f"{self.row.us[backend]:.4g} us"
        why = self.row.rejected.get(backend)
        return "not measured" if why is None else f"left out: {why}"


def explain(op: str, *args: Any, platform: Platform | None = None, **kwargs: Any) -> Explanation:
    """Say which kernel a call would run, who decided, and why no other; runs nothing.

    With arguments the per-call checks are asked too, which imports the candidates' modules.

    Args:
        op: Name of a declared or registered op.
        *args: The call's arguments, positional.
        platform: Where it would run; that of the first tensor, else of this machine.
        **kwargs: The call's arguments by name, and ``backend``.

    Raises:
        UnknownOpError: nothing is registered under the name.
        TypeError: the arguments don't fit the op's signature.
        UnknownVariableError: the environment can't be read.
    """
    selector.require_op(op)
    backend = kwargs.pop("backend", None)
    call = _arguments(op, args, kwargs)
    platform = platform or (platform_of(call) if call else None) or Platform.detect()
    scope = policy.current_scope()
    choice = policy.choose(op, scope) if backend is None else policy.Choice(None, "call")
    row = tuning.row_of(op, platform, call) if call is not None else None
    candidates = _ranked(op, platform, call, row)
    differentiated = _differentiated(op, call)
    if differentiated:
        candidates = tuple(_with_backward(op, found, platform) for found in candidates)
    measured = (row, _table(op, platform, call, row))
    try:
        plan = selector.make_plan(op, platform, backend=backend, scope=scope, args=call, row=row)
        _check(op, call)
        chosen = plan.specs[0].backend
        if differentiated:
            chosen = Backend(training.choose(op, platform, _name(backend), call))
    except (TorchOpsError, UnknownBackendError, TypeError, ValueError) as error:
        return Explanation(op, None, choice.source, candidates, platform, error, *measured)
    becomes = _in_graphs(op, call, backend, platform, whole=differentiated)
    return Explanation(op, chosen, plan.source, candidates, platform, None, *measured, becomes)


def _in_graphs(
    op: str,
    call: tuple[Any, ...] | None,
    backend: Backend | str | None,
    platform: Platform,
    *,
    whole: bool,
) -> inlining.Inlining | None:
    from torch_ops.declarations import catalogue

    if call is None or op not in catalogue():
        return None
    gradient = catalogue()[op].gradient
    if whole and gradient is not None and gradient.whole:
        return inlining.Inlining(False, "a gradient is wanted, for which the reference keeps more")
    return inlining.decide(op, call, _name(backend), platform)


def _name(backend: Backend | str | None) -> str | None:
    return backend.value if isinstance(backend, Backend) else backend


def _differentiated(op: str, call: tuple[Any, ...] | None) -> bool:
    """Whether autograd differentiates a call of an op that has derivatives."""
    from torch_ops.declarations import catalogue

    declaration = catalogue().get(op)
    if declaration is None or declaration.gradient is None or call is None:
        return False
    return torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in call)


def _with_backward(op: str, candidate: Candidate, platform: Platform) -> Candidate:
    """Judge a candidate anew, for a call with gradients."""
    why = training.lacking(op, candidate.backend.value, platform)
    if why is None:
        return candidate
    return replace(candidate, usable=False, reasons=(*candidate.reasons, why))


def _table(
    op: str, platform: Platform, call: tuple[Any, ...] | None, row: tuning.Row | None
) -> str:
    """Name the row, or say why there is none."""
    from torch_ops.declarations import catalogue

    table, refusal = tuning.active(platform)
    if table is None:
        return "" if refusal is None else f"not used: {refusal}"
    if row is not None:
        return f"{table.path}, row {row.bucket}"
    if call is None:
        return f"{table.path}, whose rows go by the call's arguments"
    declaration = catalogue().get(op)
    looked = "" if declaration is None else f" {buckets.bucket(declaration, call)}"
    return f"{table.path}, without a row{looked}: the declared order holds"


def _check(op: str, call: tuple[Any, ...] | None) -> None:
    """Raise what a call with these arguments would raise before any kernel is asked."""
    from torch_ops.calls import refuse_grad
    from torch_ops.declarations import catalogue

    declaration = catalogue().get(op)
    if declaration is None or call is None:
        return
    if _differentiated(op, call):
        training.check_constants(declaration, call)
    elif torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in call):
        raise refuse_grad(op)
    declaration.check_call(*call)


def _arguments(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    from torch_ops.declarations import catalogue

    declaration = catalogue().get(op)
    if not args and not kwargs:
        return None
    if declaration is None:
        return (*args, *kwargs.values())
    bound = declaration.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    for name in declaration.tensor_arguments:
        value = bound.arguments[name]
        optional = declaration.signature.parameters[name].annotation != Tensor
        if not (isinstance(value, Tensor) or (value is None and optional)):
            accepted = "a torch.Tensor or None" if optional else "a torch.Tensor"
            raise TypeError(f"op {op!r}: argument {name!r} is {value!r} (accepted: {accepted})")
    return bound.args


def _ranked(
    op: str, platform: Platform, args: tuple[Any, ...] | None, row: tuning.Row | None
) -> tuple[Candidate, ...]:
    """Judge every kernel; measured ones come first, then those in the declared order."""
    order = selector.order_of(op, platform) or ()
    judged = []
    for spec in registry.get(op):
        candidate = selector.judge(spec, platform, args)
        name = spec.backend.value
        if order and name not in order:
            reason = f"not in the declared order; choose it by backend={name!r}"
            candidate = Candidate(
                candidate.backend,
                candidate.usable,
                (*candidate.reasons, reason),
                candidate.state,
            )
        judged.append(candidate)

    usable = {candidate.backend.value for candidate in judged if candidate.usable}
    best = list(row.preferred([n for n in order if n in usable]) if row is not None else ())
    best += [name for name in order if name not in best]

    def rank(candidate: Candidate) -> int:
        name = candidate.backend.value
        return best.index(name) if name in best else len(best)

    return tuple(sorted(judged, key=rank))
