"""From a legal call to its kernel: the plan of the present policy, kept in a slot by scope.

The functions made here check no argument. Three callers have done that: the kernel under a device
key of the dispatcher, ``torch_ops.ops`` for a call that looks like one before, and compiled
graphs, whose fakes made the checks and whose guards hold. All of them leave two things to be
asked at every call, since no guard is about them: tangents of forward mode, and memory that is
shared with what is written.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from torch_ops import binding, policy, selector, tracing, tuning
from torch_ops.declare import Declaration
from torch_ops.errors import NoBackwardError
from torch_ops.platform import Platform, platform_of
from torch_ops.transforms import any_tangent

__all__ = ["alike", "legal", "refuse_grad"]

_CALLS = 256  # that a table decides, for an op; more start anew
_forward_ad = torch.autograd.forward_ad
_increment_version = torch._C._increment_version  # the public one takes twice the time
_scope = policy.current_scope


def refuse_grad(op: str) -> NoBackwardError:
    """Build the error for derivatives that nothing gives, the same in eager and compiled code."""
    from torch_ops.declarations import catalogue

    lacking, also = "a backward", ""
    if op in catalogue() and catalogue()[op].differentiable:
        lacking = "derivatives of torch.func or forward mode"
        also = ", torch.autograd's backward()"
    return NoBackwardError(
        f"op {op!r}: an input requires grad and no backend of the op has {lacking} "
        f"(accepted: inputs without grad{also}, or calls under torch.no_grad() or "
        "torch.inference_mode()); detach the input or leave grad mode",
        op=op,
    )


def legal(
    declaration: Declaration,
    *,
    named: bool,
    slots: dict[Any, Any] | None = None,
    in_graph: bool = False,
) -> Callable[..., Any]:
    """Make the function that runs an op's legal calls on one kind of device.

    Args:
        declaration: The op.
        named: Whether the last argument is the name of a backend.
        slots: Where plans are kept, for calls that are all alike and end with a change of policy;
            by default for calls of all looks, until such a change.
        in_graph: Whether compiled graphs call it, which bump the versions of what they write.
    """
    op, same = declaration.name, slots is not None
    slots = policy.track({}) if slots is None else slots
    find = slots.get
    written = _picker(declaration)
    bumps = bool(declaration.mutates) and not in_graph

    def call(*args: Any) -> Any:
        if _forward_ad._current_level >= 0 and any_tangent(args):
            raise refuse_grad(op)
        run = find(_scope())
        if run is None:
            run = _resolve(op, slots, _scope(), args, None, same)
        return run(*args)

    def call_mutating(*args: Any) -> None:
        if _forward_ad._current_level >= 0 and any_tangent(args):
            raise refuse_grad(op)
        declaration.memory_checker(*args)
        run = find(_scope())
        if run is None:
            run = _resolve(op, slots, _scope(), args, None, same)
        run(*args)
        if bumps:
            _increment_version(written(args))

    def call_named(*args: Any) -> Any:
        args, backend = args[:-1], args[-1]
        if _forward_ad._current_level >= 0 and any_tangent(args):
            raise refuse_grad(op)
        if mutates:
            declaration.memory_checker(*args)
        run = find((_scope(), backend))
        if run is None:
            run = _resolve(op, slots, _scope(), args, backend, same)
        result = run(*args)
        if bumps:
            _increment_version(written(args))
        return result

    mutates = bool(declaration.mutates)
    return call_named if named else call_mutating if mutates else call


def _picker(declaration: Declaration) -> Callable[[tuple[Any, ...]], Any]:
    """Make what picks the written ones from the arguments, as a tuple."""
    names = list(declaration.signature.parameters)
    indices = [names.index(name) for name in declaration.mutates]
    if len(indices) == 1:
        return operator.itemgetter(slice(indices[0], indices[0] + 1))
    return operator.itemgetter(*indices) if indices else tuple


def alike(
    declaration: Declaration, call: Callable[..., Any], args: tuple[Any, ...]
) -> Callable[..., Any]:
    """Make the function for legal calls that look like this one: without a look-up at each call.

    It is ``call``, which serves them all, unless a table decides by how they look.
    """
    platform = platform_of(args) or Platform.cpu()
    if not tuning.decides(declaration.name, platform):
        return call
    return legal(declaration, named=False, slots={})


def _resolve(
    op: str,
    slots: dict[Any, Any],
    scope: policy.Scope | None,
    args: tuple[Any, ...],
    backend: str | None,
    same: bool,
) -> Callable[..., Any]:
    """Make the plan of a call and keep it, once its kernels have run, where it holds for all."""
    made_in = policy.generation
    platform = platform_of(args) or Platform.cpu()
    undecided = backend is None and tuning.decides(op, platform)
    chosen = policy.choose(op, scope).backend is not None
    if undecided and not same and not chosen and not _unanimous(op, platform, scope):
        run, lasting = _by_look(op, platform, scope), True
    else:
        run, lasting = _bound(op, platform, scope, args, backend)
    if lasting and (platform.device == "cpu" or _one_kind()):
        policy.remember(slots, scope if backend is None else (scope, backend), made_in, run)
    return run


def _bound(
    op: str,
    platform: Platform,
    scope: policy.Scope | None,
    args: tuple[Any, ...],
    backend: str | None,
) -> tuple[Callable[..., Any], bool]:
    row = tuning.row_of(op, platform, args) if backend is None else None
    plan = selector.make_plan(op, platform, backend=backend, scope=scope, row=row)
    return binding.bind(plan, debugging=scope is not None and scope.debug)


def _unanimous(op: str, platform: Platform, scope: policy.Scope | None) -> bool:
    """Whether calls need no look: the table prefers one kernel in each row, as do calls without.

    It is the first that is declared and takes every legal call. A trace tells rows apart.
    """
    if tracing.active():
        return False
    plan = selector.make_plan(op, platform, scope=scope)
    first = selector.load(plan, plan.specs[0])
    if isinstance(first, selector.Candidate) or first.supports is not None:
        return False
    names = [spec.backend.value for spec in plan.specs]
    rows = tuning.rows_of(op, platform)
    return all(next(iter(row.preferred(names)), names[0]) == names[0] for row in rows)


def _by_look(op: str, platform: Platform, scope: policy.Scope | None) -> Callable[..., Any]:
    """Make the function that runs calls of all looks of an op that a table decides."""
    runs: dict[Any, Callable[..., Any]] = {}
    find = runs.get

    def run(*args: Any) -> Any:
        look = tuple(
            [(arg.shape, arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args]
        )
        found = find(look)
        if found is None:
            made_in = policy.generation
            found, lasting = _bound(op, platform, scope, args, None)
            if len(runs) >= _CALLS:
                runs.clear()
            if lasting:
                policy.remember(runs, look, made_in, found)
        return found(*args)

    return run


def _one_kind() -> bool:
    """Whether all visible GPUs are alike, so that one plan serves each of them."""
    count = torch.cuda.device_count()
    kinds = {(p.arch, p.name) for p in (Platform.detect(f"cuda:{i}") for i in range(count))}
    return len(kinds) == 1
