"""Who decides which backend runs: scope, process, environment. It knows no kernels.

Every change bumps one generation number and empties the plans that were made under it, so that
nothing outlives a change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, NamedTuple

import torch

from torch_ops import dynamo, environment, locks
from torch_ops.backend import Backend
from torch_ops.contracts import PROMISES
from torch_ops.errors import TorchOpsError, UnknownOpError, listing, nearest

__all__ = ["Choice", "debug", "set_backend", "use_backend"]


@dataclass(frozen=True)
class Choices:
    """Backends chosen by one source: for single ops, else for all; None clears an op's choice.

    What it requires of kernels, `torch_ops.contracts.PROMISES`, holds for all ops.
    """

    default: Backend | None = None
    per_op: Mapping[str, Backend | None] = field(default_factory=dict)
    required: frozenset[str] = frozenset()

    def over(self, outer: Choices) -> Choices:
        """Merge with what an outer scope chose; what this one says wins.

        What either requires is required.
        """
        required = self.required | outer.required
        if self.default is not None:
            return replace(self, required=required)
        return Choices(outer.default, {**outer.per_op, **self.per_op}, required)

    def get(self, op: str) -> Backend | None:
        """The backend chosen for an op, or None where this source doesn't speak."""
        return self.per_op.get(op, self.default)


@dataclass(frozen=True, eq=False)
class Scope:
    """What a context has chosen. Interned: equal scopes are one object, so plans are reused."""

    choices: Choices
    debug: bool


class Choice(NamedTuple):
    """A decision: the backend, None where the declared order decides, and who made it."""

    backend: Backend | None
    source: str


_lock = locks.reentrant()
_scope: ContextVar[Scope | None] = ContextVar("torch_ops_scope", default=None)
_outer: ContextVar[tuple[tuple[_Scoped, Scope | None], ...]] = ContextVar(
    "torch_ops_outer_scopes", default=()
)
_interned: dict[Any, Scope] = {}
_process: list[Choices] = []
_environment: environment.Environment | None = None
_plans: list[dict[Any, Any]] = []
tuned: dict[tuple[str, str | None, str], Backend] = {}
"""Measured choices of whole ops by (device, arch, op): where no row of a table speaks, and for
layers, which are prepared before they see a shape."""
_frozen: str | None = None
generation = 0
current_scope = _scope.get


def invalidate() -> None:
    """Drop every plan made so far; they are made anew at the next call."""
    global generation
    with _lock:
        generation += 1
        for plans in _plans:
            plans.clear()
        dynamo.forget()


def freeze(lacking: str) -> None:
    """Refuse changes of choice from now on: compiled code that can't follow them lives."""
    global _frozen
    _frozen = lacking


def _refuse_when_frozen() -> None:
    if _frozen is not None:
        raise TorchOpsError(
            "torch_ops: code compiled by this PyTorch depends on the present choice of backends "
            f"and can't be guarded ({_frozen}); choose before the first compile, pass backend= to "
            "the calls, or use a supported version of PyTorch"
        )


def change(apply: Callable[[], None]) -> None:
    """Make a change that plans depend on, and drop the plans.

    Raises:
        TorchOpsError: compiled code lives that can't follow it.
    """
    _refuse_when_frozen()
    with _lock:
        apply()
        invalidate()


def take_back(kept: list[Any], one: object) -> None:
    """Make the change that takes this very object out of a list, and none that equals it.

    Does nothing the second time.
    """
    if any(held is one for held in kept):
        change(lambda: kept.__setitem__(slice(None), [h for h in kept if h is not one]))


def track(plans: dict[Any, Any]) -> dict[Any, Any]:
    """Empty this dict at every change from now on."""
    _plans.append(plans)
    return plans


def remember(plans: dict[Any, Any], key: object, made_in: int, plan: object) -> None:
    """Store a plan unless something changed since its making began."""
    with _lock:
        if generation == made_in:
            plans[key] = plan


def env() -> environment.Environment:
    """The parsed environment, read at the first use.

    Raises:
        UnknownVariableError: see `torch_ops.environment.read`.
    """
    global _environment
    parsed = _environment
    if parsed is None:
        from torch_ops.declarations import catalogue
        from torch_ops.registry import registry

        known = {*registry.ops(), *catalogue()}
        made_in = generation
        writing = [name for name, declaration in catalogue().items() if declaration.mutates]
        parsed = environment.read(known, writing=writing)
        with _lock:
            if generation == made_in:  # else a refresh came in between: what was read may be old
                _environment = parsed
    return parsed


def forget_environment() -> None:
    """Read the environment anew at the next resolution."""
    global _environment
    with _lock:  # in between, what another thread read before would be kept
        _environment = None
        invalidate()


def choose(op: str, scope: Scope | None) -> Choice:
    """Decide by scope, process and environment; the rest is the declared order's."""
    chosen = scope.choices.get(op) if scope is not None else None
    if chosen is not None:
        return Choice(chosen, "scope")
    chosen = _process_choices().get(op)
    if chosen is not None:
        return Choice(chosen, "process")
    variables = env()
    chosen = variables.per_op.get(op, variables.default)
    if chosen is not None:
        return Choice(chosen, "environment")
    return Choice(None, "declared")


def required(scope: Scope | None) -> dict[str, str]:
    """Give what kernels have to promise, each with who requires it."""
    sources = (
        ("TORCH_OPS_REQUIRE", env().required),
        ("set_backend", _process_choices().required),
        ("use_backend", scope.choices.required if scope is not None else frozenset[str]()),
    )
    return {name: source for source, names in sources for name in sorted(names)}


def _process_choices() -> Choices:
    merged = Choices()
    for layer in tuple(_process):
        merged = layer.over(merged)
    return merged


def _make_choices(
    function: str,
    backend: Any,
    per_op: Mapping[str, Any],
    *,
    clearing: bool,
) -> Choices:
    from torch_ops.declarations import catalogue
    from torch_ops.registry import registry

    required = {name: value for name, value in per_op.items() if name in PROMISES}
    per_op = {name: value for name, value in per_op.items() if name not in PROMISES}
    for name, value in required.items():
        if not isinstance(value, bool):
            raise TypeError(f"{function}: {name} must be a bool, received {value!r}")
    known = sorted({*registry.ops(), *catalogue()})
    for op, value in per_op.items():
        if op not in known:
            raise UnknownOpError(
                f"No kernels registered for op {op!r}. Known: {listing(known)}."
                f"{nearest(op, known)}",
                op=op,
            )
        if value is None and not clearing:
            raise TypeError(f"{function}: backend of op {op!r} must be a Backend or str, not None")
    return Choices(
        None if backend is None else Backend(backend),
        {op: None if value is None else Backend(value) for op, value in per_op.items()},
        frozenset(name for name, value in required.items() if value),
    )


def _intern(choices: Choices, debugging: bool) -> Scope:
    key = (choices.default, tuple(sorted(choices.per_op.items())), choices.required, debugging)
    with _lock:
        return _interned.setdefault(key, Scope(choices, debugging))


class _Scoped:
    """A context manager that lays a change over the present scope; nestable and reusable.

    One object may be entered by several threads and tasks: what it is to put back is kept in each
    one's own context.
    """

    def __init__(self, change: Callable[[Scope], tuple[Choices, bool]]) -> None:
        self._change = change

    def __enter__(self) -> None:
        refuse_in_traced_code("a scope")
        outer = _scope.get() or _EMPTY
        inner = _intern(*self._change(outer))
        if inner.choices != outer.choices:
            _refuse_when_frozen()
        _outer.set((*_outer.get(), (self, _scope.get())))
        _scope.set(inner)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        entered = list(_outer.get())
        places = [place for place, (scoped, _) in enumerate(entered) if scoped is self]
        if not places:
            raise TorchOpsError("torch_ops: a scope is left that this thread or task isn't in")
        _, scope = entered[places[-1]]
        later = entered[places[-1] + 1 :]  # not empty where scopes are left out of order
        entered = entered[: places[-1]]
        for scoped, _ in later:
            entered.append((scoped, scope))
            scope = _intern(*scoped._change(scope or _EMPTY))
        _outer.set(tuple(entered))
        _scope.set(scope)


_EMPTY = _intern(Choices(), False)


def refuse_in_traced_code(what: str) -> None:
    """Raise where Dynamo traces: it follows no ContextVar, so nothing can be chosen there."""
    if torch.compiler.is_dynamo_compiling() or dynamo.traced_otherwise():
        raise TorchOpsError(
            f"torch_ops: {what} can't be entered inside code that torch.compile traces; pass "
            "backend= to the call instead, or enter the scope around the compiled function"
        )


def use_backend(backend: Backend | str | None = None, /, **per_op: Backend | str | bool) -> _Scoped:
    """Choose backends for the calls in a ``with`` block, in this thread or task alone.

    The choice is strict: the backend runs or the call raises. Around a compiled function it
    takes effect; inside traced code it is refused, pass ``backend=`` there.

    Args:
        backend: Backend of every op that isn't named.
        **per_op: Backend of single ops, ``use_backend("triton", rms_norm="torch")``; and what
            kernels have to promise, beside their backend: ``deterministic=True`` (equal inputs
            give equal bits), ``batch_invariant=True`` (a row's bits don't depend on the others).
            False leaves open what an outer scope requires; no scope lifts that.

    Raises:
        UnknownOpError: an op's name is unknown.
        UnknownBackendError: a backend's name is unknown; a ValueError, too.
    """
    refuse_in_traced_code("use_backend")
    chosen = _make_choices("use_backend", backend, per_op, clearing=False)
    return _Scoped(lambda outer: (chosen.over(outer.choices), outer.debug))


def debug(enabled: bool = True) -> _Scoped:
    """Switch data-dependent and aliasing checks on in a ``with`` block. They synchronize."""
    return _Scoped(lambda outer: (outer.choices, enabled))


def set_backend(
    backend: Backend | str | None = None, /, **per_op: Backend | str | bool | None
) -> Callable[[], None]:
    """Choose backends for the whole process, all threads, until the returned undo is called.

    Args:
        backend: Backend of every op that isn't named.
        **per_op: Backend of single ops; None clears what an earlier call chose for the op. And
            what kernels have to promise, as in `use_backend`.

    Returns:
        A function that takes back this call's choices and no others, in any order.

    Raises:
        UnknownOpError: an op's name is unknown.
        UnknownBackendError: a backend's name is unknown; a ValueError, too.
    """
    refuse_in_traced_code("set_backend")
    _refuse_when_frozen()
    layer = replace(_make_choices("set_backend", backend, per_op, clearing=True))
    with _lock:
        _process.append(layer)
        invalidate()

    def undo() -> None:
        with _lock:
            if any(held is layer for held in _process):
                _process[:] = [held for held in _process if held is not layer]
                invalidate()

    return undo
