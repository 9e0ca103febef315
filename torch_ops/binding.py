"""From a plan to a function: loads the plan's kernels and runs the first that takes the call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops import kernels, once, policy, tracing
from torch_ops.errors import BackendUnavailableError, DeclarationError, TorchOpsError
from torch_ops.kernels import Kernel
from torch_ops.once import KernelLoadError
from torch_ops.selector import Candidate, Plan, describe, load, none_usable, unavailable

__all__ = ["bind", "foresee"]

_is_alias_of = torch._C._is_alias_of  # type: ignore[attr-defined]
_log = logging.getLogger(__name__)
_logged: set[tuple[str, str, str]] = set()
_FAILED = "loading it failed: "


def bind(plan: Plan, *, debugging: bool) -> tuple[Callable[..., Any], bool]:
    """Load a plan's kernels.

    Returns:
        A function of the call's arguments, and whether it may serve later calls too: a kernel
        that takes every legal call is bound anew, by itself, once it has run.
    """
    chain, skipped = _load(plan)
    _log_skipped(plan, skipped)
    last = chain[-1]
    alone = len(chain) == 1 and last.supports is None
    if alone and last.verified:
        run, lasting = last.function, True
        if tracing.active():
            run = tracing.counted(run, _way(plan, last, skipped))
    else:
        run, lasting = _run_chain(plan, chain, skipped), last.verified or not alone
    if debugging:
        run = _debugged(plan.op, run)
    return run, lasting


def _load(plan: Plan) -> tuple[list[Kernel], list[Candidate]]:
    """Load kernels in order, up to the first that takes every legal call."""
    chain: list[Kernel] = []
    skipped = list(plan.skipped)
    for spec in plan.specs:
        loaded = load(plan, spec)
        if isinstance(loaded, Candidate):
            skipped.append(loaded)
            continue
        chain.append(loaded)
        if loaded.supports is None:
            break
    if not chain:
        raise none_usable(plan.op, plan.platform, skipped, None)
    return chain, skipped


def _run_chain(plan: Plan, chain: list[Kernel], skipped: list[Candidate]) -> Callable[..., Any]:
    """Ask each kernel's predicate with the real arguments and run the first that agrees."""
    first, traced = chain[0], tracing.active()
    agrees, function = first.supports, first.function
    if traced:
        function = tracing.counted(function, _way(plan, first, skipped))

    def run(*args: Any) -> Any:
        if first.verified and (agrees is None or agrees(*args) is None):
            try:  # the usual case at the least cost; what didn't start goes the long way
                return function(*args)
            except (BackendUnavailableError, KernelLoadError):
                pass
        refused: list[tuple[Kernel, str]] = []
        for kernel in chain:
            reason = _refusal(plan, kernel, args)
            if reason is None:
                started = kernel.function
                if traced:
                    started = tracing.counted(started, _way(plan, kernel, skipped, refused))
                try:
                    result = started(*args)
                except Exception as error:
                    reason = _not_started(plan, kernel, error, args)
                    if reason is None:
                        raise
                else:
                    kernel.verified = True
                    return result
            refused.append((kernel, reason))
            _log_refused(plan.op, kernel.spec.backend.value, reason)
        rest = plan.specs[plan.specs.index(chain[-1].spec) + 1 :]
        if not rest:
            raise _nothing_ran(plan, refused, skipped, args)
        # The last one takes every legal call, so those after it were left out; it didn't start.
        later, _ = bind(plan._replace(specs=rest, skipped=_all(refused, skipped)), debugging=False)
        return later(*args)

    return run


def foresee(plan: Plan, args: Sequence[Any]) -> tracing.Way:
    """Tell how a call goes, without running it: the arguments may be fake tensors.

    Raises:
        TorchOpsError: nothing can run it.
        Exception: a kernel's predicate has to see data.
    """
    chain, skipped = _load(plan)
    refused: list[tuple[Kernel, str]] = []
    for kernel in chain:
        reason = None if plan.explicit else _refusal(plan, kernel, args)
        if reason is None:
            return _way(plan, kernel, skipped, refused)
        refused.append((kernel, reason))
    raise _nothing_ran(plan, refused, skipped, args)


def _way(
    plan: Plan,
    kernel: Kernel,
    skipped: Sequence[Candidate],
    refused: Sequence[tuple[Kernel, str]] = (),
) -> tracing.Way:
    names = [(c.backend, "; ".join(c.reasons)) for c in skipped]
    names += [(other.spec.backend, why) for other, why in refused]
    return tracing.way_of(plan.op, kernel.spec.backend, plan.source, names)


def _refusal(plan: Plan, kernel: Kernel, args: Sequence[Any]) -> str | None:
    try:
        return kernels.refusal(kernel, args)
    except DeclarationError as error:
        if plan.explicit:
            raise
        return str(error)


def _all(
    refused: Sequence[tuple[Kernel, str]], skipped: Sequence[Candidate]
) -> tuple[Candidate, ...]:
    judged = [
        Candidate(kernel.spec.backend, False, (reason,), kernels.state(kernel.spec))
        for kernel, reason in refused
    ]
    return (*judged, *skipped)


def _not_started(plan: Plan, kernel: Kernel, error: Exception, args: Sequence[Any]) -> str | None:
    """Give why a kernel didn't start, where another one may run instead; None to raise the error.

    Raises:
        BackendUnavailableError: its code can't be loaded, and somebody asked for this backend.
    """
    if isinstance(error, BackendUnavailableError):
        own = error.op == plan.op and error.backend == kernel.spec.backend.value
        return "; ".join(error.reasons) if own and not plan.explicit else None
    reason = once.load_failure(error)
    if reason is None or (kernel.verified and not isinstance(error, KernelLoadError)):
        return None
    if not kernel.verified:
        kernels.fail(kernel, reason)
        policy.invalidate()
    if plan.explicit:
        choice = policy.Choice(kernel.spec.backend, plan.source)
        raise unavailable(plan.op, choice, plan.platform, (_FAILED + reason,), args) from error
    return _FAILED + reason


def _nothing_ran(
    plan: Plan,
    refused: Sequence[tuple[Kernel, str]],
    skipped: Sequence[Candidate],
    args: Sequence[Any],
) -> TorchOpsError:
    if plan.explicit:
        kernel, reason = refused[0]
        choice = policy.Choice(kernel.spec.backend, plan.source)
        return unavailable(plan.op, choice, plan.platform, (reason,), args)
    return none_usable(plan.op, plan.platform, _all(refused, skipped), args)


def _log_skipped(plan: Plan, skipped: Sequence[Candidate]) -> None:
    """Say once that a preferred backend can't run, and why."""
    for candidate in skipped:
        key = (plan.op, candidate.backend.value, "; ".join(candidate.reasons))
        if key not in _logged:
            _logged.add(key)
            _log.info("degraded: op %r skips backend %r: %s", *key)


def _log_refused(op: str, backend: str, reason: str) -> None:
    """Say at the first call that a backend refuses that it does, and why; reasons name values."""
    key = (op, backend, "")
    if key not in _logged:
        _logged.add(key)
        _log.info("degraded: op %r skips backend %r: %s", op, backend, reason)


def _debugged(op: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Add the checks of ``debug()``: those that read data, and of all that a kernel returns.

    The others are made here too: compiled graphs make them while they are traced alone.
    """
    from torch_ops.declarations import catalogue

    declaration = catalogue()[op]

    def debugged(*args: Any) -> Any:
        declaration.check_call(*args)
        if declaration.debug_checker is not None:
            declaration.debug_checker(*args)
        result = run(*args)
        outputs = _outputs(op, result, declaration.outputs)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        for index, output in enumerate(outputs):
            others = [*tensors, *outputs[:index]]
            if any(_is_alias_of(output, other) for other in others):
                raise DeclarationError(
                    f"op {op!r}: output {index} shares memory with an input or another output; "
                    "a functional op returns fresh tensors"
                )
            if not output.is_contiguous():
                raise DeclarationError(
                    f"op {op!r}: output {index} has strides {output.stride()} for shape "
                    f"{list(output.shape)}; outputs are contiguous"
                )
        if outputs:
            _compare(op, outputs, declaration.faker, args)
        return result

    return debugged


def _outputs(op: str, result: object, count: int) -> list[Tensor]:
    outputs = (result,) if isinstance(result, Tensor) else result
    if not count and result is None:
        return []
    if isinstance(outputs, tuple | list) and len(outputs) == count > 0:
        tensors = [output for output in outputs if isinstance(output, Tensor)]
        if len(tensors) == count:
            return tensors
    raise DeclarationError(
        f"op {op!r}: a kernel returned {_named(result)} (declared: {count or 'no'} tensors)"
    )


def _named(result: object) -> str:
    if isinstance(result, tuple | list):
        return f"a {type(result).__name__} of {len(result)}"
    return type(result).__name__


def _compare(
    op: str, outputs: Sequence[Tensor], faker: Callable[..., Any], args: Sequence[Any]
) -> None:
    """Compare with what compiled code is told by the fake."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        told = faker(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
    for index, (output, fake) in enumerate(
        zip(outputs, [told] if isinstance(told, Tensor) else told, strict=True)
    ):
        got, wanted = describe(output), describe(fake)
        if got != wanted:
            raise DeclarationError(
                f"op {op!r}: output {index} is {got}, by the declaration's fake {wanted}"
            )
        if output.requires_grad:
            raise DeclarationError(f"op {op!r}: output {index} requires grad, and no input does")
