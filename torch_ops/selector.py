"""From an op and a platform to the kernels that may run, in order. Loads nothing by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_ops import discovery, kernels, policy, promises, tuning
from torch_ops.backend import Backend
from torch_ops.errors import (
    AmbiguousBackendError,
    BackendUnavailableError,
    CaptureError,
    DeclarationError,
    NoBackendError,
    TorchOpsError,
    UnknownOpError,
    listing,
    nearest,
)
from torch_ops.platform import Platform, Requirement, platform_of, rejection
from torch_ops.registry import registry
from torch_ops.spec import KernelSpec

__all__ = ["Candidate", "Plan", "get_kernel", "select_kernel"]

_log = logging.getLogger(__name__)
_RAN_FORWARD = ", which ran forward"


@dataclass(frozen=True)
class Candidate:
    """One registered kernel of an op, judged.

    Attributes:
        backend: Who wrote it.
        usable: Whether it may run.
        reasons: Why not, all of them: value received, limit, what to do.
        state: ``"declared"``, ``"found"``, ``"imported"``, ``"verified"`` or ``"failed"``.
    """

    backend: Backend
    usable: bool
    reasons: tuple[str, ...]
    state: str


class Plan(NamedTuple):
    """What may run for one op on one platform under one policy.

    Attributes:
        op: The op's name.
        platform: Where it is to run.
        source: Who decided: call, scope, process, environment, tuned, declared or, of a backward,
            forward.
        specs: Usable kernels in order; exactly one where the choice is explicit.
        skipped: Candidates that come before or beside them and why they can't run.
        unchecked: Whether per-call checks are off.
    """

    op: str
    platform: Platform
    source: str
    specs: tuple[KernelSpec, ...]
    skipped: tuple[Candidate, ...]
    unchecked: bool = False

    @property
    def explicit(self) -> bool:
        """Whether somebody asked for this very backend."""
        return self.source not in ("tuned", "declared")


def require_op(op: str) -> None:
    """Raise `UnknownOpError` for a name that is neither declared nor registered."""
    from torch_ops.declarations import catalogue

    if op not in catalogue() and not registry.get(op):
        known = sorted({*catalogue(), *registry.ops()})
        raise UnknownOpError(
            f"No kernels registered for op {op!r}. Known: {listing(known)}."
            f"{nearest(op, known) if isinstance(op, str) else ''}",
            op=op,
        )


def policy_reasons(
    op: str,
    backend: Backend,
    requires: frozenset[Requirement],
    platform: Platform,
    package: discovery.BackendPackage | None,
    scope: policy.Scope | None,
) -> list[str]:
    """Give why a backend may not serve an op: disabled, elsewhere, or promising too little."""
    reasons: list[str | None] = [policy.env().disables(op, backend), rejection(requires, platform)]
    reasons += promises.lacking(op, package, policy.required(scope), platform.device)
    return [reason for reason in reasons if reason]


def static_reasons(spec: KernelSpec, platform: Platform) -> tuple[str, ...]:
    """Give every reason, known without the call's arguments, why a kernel can't run here."""
    package = promises.package_of(spec)
    scope = policy.current_scope()
    reasons = policy_reasons(spec.op, spec.backend, spec.requires, platform, package, scope)
    if package is not None and package.refusal:
        reasons.append(package.refusal)
    elif missing := kernels.missing(spec):
        reasons.append(missing)
    failed = kernels.failure(spec)
    if failed:
        reasons.append(f"loading it failed: {failed}")
    return tuple(reasons)


def call_reasons(spec: KernelSpec, args: Sequence[Any]) -> tuple[str, ...]:
    """Load a kernel and give why it can't serve these arguments, if so.

    Raises:
        DeclarationError: its predicate answers neither None nor a reason.
    """
    try:
        kernel = kernels.load(spec)
    except Exception as error:  # whatever a foreign module raises is a reason, kept and shown
        return (f"loading it failed: {type(error).__name__}: {error}",)
    reason = kernels.refusal(kernel, args)
    return () if reason is None else (reason,)


def judge(
    spec: KernelSpec,
    platform: Platform,
    args: Sequence[Any] | None = None,
    *,
    strict: bool = False,
) -> Candidate:
    """Give a kernel's verdict: with arguments also that of its own per-call predicate.

    Raises:
        DeclarationError: the predicate answers neither None nor a reason, and this kernel was
            asked for (``strict``); else that is a reason itself.
    """
    reasons = static_reasons(spec, platform)
    if not reasons and args is not None:
        try:
            reasons = call_reasons(spec, args)
        except DeclarationError as error:
            if strict:
                raise
            reasons = (str(error),)
    return Candidate(spec.backend, not reasons, reasons, kernels.state(spec))


def order_of(op: str, platform: Platform) -> tuple[str, ...] | None:
    """Give the declared order of an op on a platform; None for an op that isn't declared."""
    from torch_ops.declarations import catalogue

    declaration = catalogue().get(op)
    return None if declaration is None else declaration.order[platform.device]


def as_forward(backend: str) -> str:
    """Name a backend for the backward of a call that it ran: whatever the policy is by then.

    Requirements and what is disabled were asked before forward ran. Compiled graphs hold the name.
    """
    return backend.removesuffix(_RAN_FORWARD) + _RAN_FORWARD


def ran_forward(backend: Backend | str | None) -> str | None:
    """Give the backend of such a name, None for any other name."""
    if not isinstance(backend, str) or not backend.endswith(_RAN_FORWARD):
        return None
    return backend.removesuffix(_RAN_FORWARD)


def decide(op: str, backend: Backend | str | None, scope: policy.Scope | None) -> policy.Choice:
    """Apply the sources in their order: call, scope, process, environment."""
    if backend is None:
        return policy.choose(op, scope)
    policy.env()
    name = backend.value if isinstance(backend, Backend) else backend
    package = discovery.packages().get(name)
    if package is not None:
        package.refuse_conflict()
    return policy.Choice(registry.find(op, name).backend, "call")


def make_plan(
    op: str,
    platform: Platform,
    *,
    backend: Backend | str | None = None,
    scope: policy.Scope | None = None,
    args: Sequence[Any] | None = None,
    unchecked: bool = False,
    row: tuning.Row | None = None,
) -> Plan:
    """Resolve a call as far as it can be without running anything.

    Args:
        op: Name of the op.
        platform: Where it is to run.
        backend: Explicit choice, strict; nothing is asked of one that `as_forward` names.
        scope: The context's choices.
        args: The call's arguments; given, the candidates' per-call checks run.
        unchecked: Leave out the checks of an explicit choice.
        row: What was measured for such calls; decides where nobody has chosen.

    Raises:
        UnknownOpError, UnknownBackendError, BackendUnavailableError, NoBackendError,
        AmbiguousBackendError, PluginConflictError, UnknownVariableError: see their docstrings.
    """
    require_op(op)
    forward = ran_forward(backend)
    if forward is not None:
        return Plan(op, platform, "forward", (registry.find(op, forward),), ())
    choice = decide(op, backend, scope)
    if choice.backend is not None:
        return _explicit(op, platform, choice, args, unchecked)
    return _automatic(op, platform, args, row)


def _explicit(
    op: str,
    platform: Platform,
    choice: policy.Choice,
    args: Sequence[Any] | None,
    unchecked: bool,
) -> Plan:
    assert choice.backend is not None
    package = discovery.package(choice.backend)
    if package is not None:
        package.refuse_conflict()
    spec = registry.find(op, choice.backend)
    if not unchecked:
        candidate = judge(spec, platform, args, strict=True)
        if not candidate.usable:
            kernels.refuse_mismatch(spec)
            raise unavailable(op, choice, platform, candidate.reasons, args)
    return Plan(op, platform, choice.source, (spec,), (), unchecked)


def _automatic(
    op: str, platform: Platform, args: Sequence[Any] | None, row: tuning.Row | None
) -> Plan:
    specs = {spec.backend.value: spec for spec in registry.get(op)}
    judged = {name: judge(spec, platform, args) for name, spec in specs.items()}
    order = order_of(op, platform)
    if order is None:
        return _only_one(op, platform, specs, judged, args)
    for name in specs:
        if name not in order:
            reason = (
                f"not in the declared order of {op!r} on {platform.device}; choose it by "
                f"backend={name!r} or torch_ops.use_backend({op}={name!r})"
            )
            old = judged[name]
            judged[name] = Candidate(old.backend, False, (*old.reasons, reason), old.state)
    ranked = sorted(specs, key=lambda name: order.index(name) if name in order else len(order))
    best = policy.tuned.get((platform.device, platform.arch, op))
    measured: tuple[str, ...] = () if best is None else (best.value,)
    if row is not None:
        measured = row.preferred([name for name in order if name in specs and judged[name].usable])
    measured = tuple(name for name in measured if name in judged and judged[name].usable)
    ranked = [*measured, *(name for name in ranked if name not in measured)]
    source = "tuned" if measured else "declared"
    usable = tuple(specs[name] for name in ranked if judged[name].usable)
    skipped = tuple(judged[name] for name in ranked if not judged[name].usable)
    if not usable:
        raise none_usable(op, platform, skipped, args)
    return Plan(op, platform, source, usable, skipped)


def _only_one(
    op: str,
    platform: Platform,
    specs: dict[str, KernelSpec],
    judged: dict[str, Candidate],
    args: Sequence[Any] | None,
) -> Plan:
    usable = [name for name, candidate in judged.items() if candidate.usable]
    skipped = tuple(candidate for candidate in judged.values() if not candidate.usable)
    if not usable:
        raise none_usable(op, platform, skipped, args)
    if len(usable) > 1:
        raise AmbiguousBackendError(
            f"op {op!r} has multiple backends usable on device {platform.device!r}: "
            f"{listing(usable)}; pass backend=... to choose one"
            + "".join(f"\n{line}" for line in candidate_lines(skipped)),
            op=op,
            candidates=tuple(judged.values()),
        )
    return Plan(op, platform, "declared", (specs[usable[0]],), skipped)


def none_usable(
    op: str,
    platform: Platform,
    candidates: Sequence[Candidate],
    args: Sequence[Any] | None,
) -> NoBackendError:
    """Build the error that lists every candidate with all its reasons."""
    lines = [f"op {op!r} has no backend usable on device {platform.device!r}"]
    lines += context_lines(op, platform, args)
    lines += candidate_lines(candidates)
    lines.append(
        "  Change what the reasons name, install or enable a backend that serves this platform, "
        f"or skip the checks of one: torch_ops.select_kernel({op!r}, backend=..., unchecked=True)."
    )
    return NoBackendError("\n".join(lines), op=op, candidates=tuple(candidates))


def unavailable(
    op: str,
    choice: policy.Choice,
    platform: Platform,
    reasons: tuple[str, ...],
    args: Sequence[Any] | None,
) -> BackendUnavailableError:
    """Build the error of an explicit choice that can't run."""
    assert choice.backend is not None
    name = choice.backend.value
    lines = [f"op {op!r}: backend {name!r}, chosen by {choice.source}, is not usable here"]
    lines += context_lines(op, platform, args)
    lines += [f"    {name}  {reason}" for reason in reasons]
    lines.append(
        f"  Change what the reasons name, choose another backend of {op!r} "
        f"({listing([spec.backend.value for spec in registry.get(op)])}), "
        "or pass unchecked=True to select_kernel to skip the check."
    )
    return BackendUnavailableError("\n".join(lines), op=op, backend=name, reasons=reasons)


def context_lines(op: str, platform: Platform, args: Sequence[Any] | None) -> list[str]:
    """Describe call and platform for a message."""
    lines = [f"  platform  {platform}, torch {torch.__version__}"]
    if args is not None:
        lines.insert(0, f"  call      {describe_call(op, args)}")
    return lines


def candidate_lines(candidates: Sequence[Candidate]) -> list[str]:
    """Give a line for every reason of every candidate."""
    return [
        f"    {candidate.backend.value}  {reason}"
        for candidate in candidates
        for reason in candidate.reasons
    ]


def describe_call(op: str, args: Sequence[Any]) -> str:
    """Format arguments as ``x=bfloat16[17, 5120]@cuda:0, eps=1e-06``, defaults too."""
    from torch_ops.declarations import catalogue

    declaration = catalogue().get(op)
    parameters = list(declaration.signature.parameters.values()) if declaration else []
    names = [parameter.name for parameter in parameters]
    names += [f"arg{i}" for i in range(len(names), len(args))]
    values = dict(zip(names, args, strict=False))
    for parameter in parameters[len(args) :]:
        if parameter.default is not parameter.empty:
            values[parameter.name] = parameter.default
    return ", ".join(f"{name}={describe(value)}" for name, value in values.items())


def describe(value: object) -> str:
    """Format one argument; a tensor by dtype, shape and device."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)}@{value.device}"
    return repr(value)


def select_kernel(
    op: str,
    backend: Backend | str | None = None,
    *,
    platform: Platform | None = None,
    args: Sequence[Any] | None = None,
    unchecked: bool = False,
) -> KernelSpec:
    """Choose the kernel of an op; refuses to guess.

    The first of these that speaks decides: ``backend``, scope, process, environment, tuned
    table, declared order. An op that was only registered has no order.

    Args:
        op: Name of a declared or registered op.
        backend: Explicit choice, strict.
        platform: Where it is to run; that of the first tensor of ``args``, else of this machine.
        args: The call's arguments; given, the candidates' per-call checks run too.
        unchecked: Return an explicit choice even where its checks refuse it.

    Returns:
        The spec; nothing is imported unless ``args`` is given.

    Raises:
        UnknownOpError: nothing is registered under the name.
        UnknownBackendError: the op has no such backend.
        BackendUnavailableError: the explicit choice can't run; carries ``reasons``.
        NoBackendError: no candidate can run; carries ``candidates``.
        AmbiguousBackendError: several can, and nothing decides.
    """
    if platform is None:
        platform = (platform_of(args) if args is not None else None) or Platform.detect()
    return make_plan(
        op,
        platform,
        backend=backend,
        scope=policy.current_scope(),
        args=args,
        unchecked=unchecked,
        row=None if args is None else tuning.row_of(op, platform, args),
    ).specs[0]


def load(plan: Plan, spec: KernelSpec) -> kernels.Kernel | Candidate:
    """Load a kernel of a plan; where nobody asked for it, a failure is a verdict.

    Raises:
        CaptureError: it isn't loaded and a stream is capturing. That is no fault of the kernel's,
            so the next in order would be a silent change.
        DeclarationError, BackendUnavailableError: it can't be loaded, and was asked for.
    """
    try:
        return kernels.load(spec)
    except CaptureError:
        raise
    except Exception as error:
        if plan.explicit and isinstance(error, TorchOpsError):
            raise
        reason = f"loading it failed: {type(error).__name__}: {error}"
        if plan.explicit:
            choice = policy.Choice(spec.backend, plan.source)
            raise unavailable(plan.op, choice, plan.platform, (reason,), None) from error
        return Candidate(spec.backend, False, (reason,), kernels.state(spec))


def get_kernel(op: str, backend: Backend | str | None = None) -> Callable[..., Any]:
    """Choose as `select_kernel` does and import the backend's own function, without any checks.

    Raises:
        BackendUnavailableError: importing it failed; the reason holds type and text.
        DeclarationError: its signature differs from the declaration's.
    """
    plan = make_plan(op, Platform.detect(), backend=backend, scope=policy.current_scope())
    skipped = list(plan.skipped)
    for spec in plan.specs:
        loaded = load(plan, spec)
        if isinstance(loaded, kernels.Kernel):
            return loaded.function
        skipped.append(loaded)
    raise none_usable(op, plan.platform, skipped, None)
