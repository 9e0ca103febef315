"""Whether a call dissolves in a compiled graph: the switch of each op, and what it says of a call.

What dissolves is traced as the op's reference and fused with its neighbours. Everything else stays
one call of the kernel that the policy chooses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from torch_ops import kernels, policy, selector, tuning
from torch_ops.backend import Backend
from torch_ops.errors import TorchOpsError, UnknownOpError, listing, nearest
from torch_ops.platform import Platform, platform_of
from torch_ops.registry import registry

__all__ = [
    "AUTO",
    "Inlining",
    "Mode",
    "decide",
    "digest",
    "rows_for",
    "set_inline",
    "state",
    "switches",
]

Mode = bool | Literal["auto"]
AUTO: Literal["auto"] = "auto"


class Inlining(NamedTuple):
    """What becomes of a call in a compiled graph.

    Attributes:
        inlined: Whether the reference is put in its place.
        reason: Why.
    """

    inlined: bool
    reason: str


@dataclass(frozen=True)
class _Switches:
    """What one call of `set_inline` says; None in ``per_op`` clears what an earlier one said."""

    default: Mode | None = None
    per_op: Mapping[str, Mode | None] = field(default_factory=dict)


_process: list[_Switches] = []


def set_inline(mode: Mode | None = None, /, **per_op: Mode | None) -> Callable[[], None]:
    """Choose for the whole process which ops dissolve in graphs that ``torch.compile`` makes.

    A dissolved op is traced as its reference, so that PyTorch's compiler fuses it with its
    neighbours; any other one stays one call. Graphs that are compiled already follow, as they
    follow a choice of backend. What writes its arguments stays one call, and so does every op in
    ``torch.export`` and in `debug`. A `trace` counts what has dissolved as ``"inlined"``.

    Args:
        mode: For every op that isn't named. ``"auto"``, which holds where nobody says anything: an
            op dissolves where the backend that would run is ``torch`` and the op has a backend
            ``inductor`` too, which proves its reference as compiled code; a table of measured
            times decides where it has a row. True: also where the declared order or a table
            prefers a kernel; another backend that somebody chose still runs. False: never.
        **per_op: For single ops, ``set_inline(rms_norm=False)``; None clears what an earlier call
            said of the op.

    Returns:
        A function that takes back this call's switches and no others, in any order.

    Raises:
        UnknownOpError: an op's name is unknown.
        TypeError: a mode is none of these.
        TorchOpsError: True for an op that writes its arguments, or compiled code lives that can't
            follow.
    """
    policy.refuse_in_traced_code("set_inline")
    switches = _checked(mode, per_op)
    policy.change(lambda: _process.append(switches))

    def undo() -> None:
        policy.take_back(_process, switches)

    return undo


def _checked(mode: Any, per_op: Mapping[str, Any]) -> _Switches:
    from torch_ops.declarations import catalogue

    for name, value in (("mode", mode), *per_op.items()):
        if not (value is None or isinstance(value, bool) or value == AUTO):
            raise TypeError(
                f"set_inline: {name} must be 'auto', True, False or None, received {value!r}"
            )
    known = sorted(catalogue())
    for op, value in per_op.items():
        if op not in known:
            raise UnknownOpError(
                f"set_inline: no op {op!r} is declared. Known: {listing(known)}."
                f"{nearest(op, known)}",
                op=op,
            )
        if value is True and catalogue()[op].mutates:
            raise TorchOpsError(
                f"set_inline: op {op!r} writes {listing(catalogue()[op].mutates)} and stays one "
                f"call, received {op}=True (accepted: 'auto', False, None)"
            )
    return _Switches(mode, dict(per_op))


def switches(op: str) -> tuple[Mode, str]:
    """Give the op's switch and who set it.

    Raises:
        UnknownVariableError: the environment can't be read.
    """
    for said in reversed(_process):
        found = said.per_op.get(op, said.default)
        if found is not None:
            return found, "set_inline"
        if op in said.per_op:
            break
    variables = policy.env()
    if op in variables.inline:
        return cast(Mode, variables.inline[op]), "TORCH_OPS_INLINE"
    if None in variables.inline:
        return cast(Mode, variables.inline[None]), "TORCH_OPS_INLINE"
    return AUTO, "by default"


def decide(
    op: str, args: Sequence[Any] | None, backend: str | None, platform: Platform | None = None
) -> Inlining:
    """Say what becomes of a call in a graph that is compiled now.

    Args:
        op: Name of a declared op.
        args: The call's arguments, by position. None for what holds of all calls: it dissolves if
            all do.
        backend: The backend that the call names.
        platform: Where it runs; that of the first tensor by default.

    Raises:
        TorchOpsError: the call itself would raise it.
    """
    from torch_ops.declarations import catalogue

    declaration = catalogue()[op]
    mode, source = switches(op)
    said = "auto" if mode == AUTO else f"{mode} by {source}"
    platform = platform or platform_of(args or ()) or Platform.cpu()
    refusal = _refusal(op, mode, said)
    if refusal is not None:
        return Inlining(False, refusal)
    rows = rows_for(op, platform, args, backend)
    verdicts = [_by_plan(declaration, backend, platform, row, mode, said) for row in rows]
    if all(verdict.inlined for verdict in verdicts):
        return verdicts[-1]
    if any(verdict.inlined for verdict in verdicts):
        return Inlining(False, f"{said}: the table of measured times decides at each call")
    return verdicts[-1]


def state(op: str, platform: Platform, backend: str | None) -> bool | None:
    """Give what a graph depends on beside backends and tables; None where sizes decide."""
    rows = rows_for(op, platform, None, backend)
    if len(rows) == 1 or switches(op)[0] != AUTO:
        return decide(op, None, backend, platform).inlined
    return None if _refusal(op, AUTO, "auto") is None else False


def digest() -> str:
    """Name what the switches say, where they say anything."""
    said = [(held.default, sorted(held.per_op.items())) for held in _process]
    variables = sorted(policy.env().inline.items(), key=str)
    if not said and not variables:
        return ""
    return hashlib.sha256(repr((said, variables)).encode()).hexdigest()[:8]


def _refusal(op: str, mode: Mode, said: str) -> str | None:
    """Give why no call of the op dissolves, whatever its backend, or None."""
    from torch_ops.declarations import catalogue

    scope = policy.current_scope()
    if mode is False:
        return said
    if catalogue()[op].mutates:
        return f"{said}: it writes its arguments"
    if scope is not None and scope.debug:
        return f"{said}: debug() checks every call"
    required = policy.required(scope)
    if required:
        names = ", ".join(f"{name} by {source}" for name, source in required.items())
        return f"{said}: kernels promise what is required ({names}), fused code doesn't"
    proven = any(spec.backend is Backend.INDUCTOR for spec in registry.get(op))
    if mode == AUTO and not proven:
        return f"{said}: it has no backend 'inductor', which proves its reference as compiled code"
    return None


def rows_for(
    op: str, platform: Platform, args: Sequence[Any] | None, backend: str | None
) -> list[tuning.Row | None]:
    """Give the rows that may speak for the call: all, and none, where its sizes aren't numbers."""
    chosen = backend is not None or policy.choose(op, policy.current_scope()).backend is not None
    if chosen or not tuning.decides(op, platform):
        return [None]
    if args is not None and not _varies(args):
        return [tuning.row_of(op, platform, args)]
    return [*tuning.rows_of(op, platform), None]


def _varies(args: Sequence[Any]) -> bool:
    sizes = [size for arg in args if isinstance(arg, Tensor) for size in arg.shape]
    return any(isinstance(value, torch.SymInt | torch.SymFloat) for value in (*sizes, *args))


def _by_plan(
    declaration: Any,
    backend: str | None,
    platform: Platform,
    row: tuning.Row | None,
    mode: Mode,
    said: str,
) -> Inlining:
    scope = policy.current_scope()
    plan = selector.make_plan(declaration.name, platform, backend=backend, scope=scope, row=row)
    first = plan.specs[0].backend
    spec = next((spec for spec in plan.specs if spec.backend is Backend.TORCH), None)
    if first is not Backend.TORCH and (plan.explicit or mode == AUTO):
        return Inlining(False, f"{said}: backend {first.value!r} ({plan.source})")
    if spec is None:
        reasons = [c.reasons for c in plan.skipped if c.backend is Backend.TORCH]
        why = "; ".join(reasons[0]) if reasons else "it has none"
        return Inlining(False, f"{said}: backend 'torch' isn't usable: {why}")
    if kernels.load(spec).function is not declaration.reference:
        return Inlining(False, f"{said}: its backend 'torch' isn't the reference")
    return Inlining(True, f"{said}: backend {first.value!r} ({plan.source})")
