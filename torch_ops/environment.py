"""The ``TORCH_OPS_*`` variables: one parser, read at the first resolution and by ``refresh()``."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torch_ops.backend import Backend
from torch_ops.contracts import PROMISES
from torch_ops.errors import UnknownVariableError, listing, nearest

__all__ = ["VARIABLES", "Environment", "read"]

_PREFIX = "TORCH_OPS_"
VARIABLES = {
    "TORCH_OPS_BACKEND": "Backend of all ops (`triton`) or of some (`rms_norm=flashinfer,...`).",
    "TORCH_OPS_DISABLE": "Backends that never run (`flashinfer`), also per op (`rms_norm:triton`).",
    "TORCH_OPS_INLINE": "Ops that dissolve in compiled graphs: `auto`, `false`, `rms_norm=true`.",
    "TORCH_OPS_REQUIRE": "What kernels have to promise: `deterministic`, `batch_invariant`.",
    "TORCH_OPS_TUNING_TABLE": "File of `torch-ops tune --save`, or `none`: not the shipped one.",
}
"""Every variable that is read, with what it does."""
_MODES: dict[str, bool | str] = {
    "auto": "auto",
    "true": True,
    "1": True,
    "false": False,
    "0": False,
}
_ONE_OP = {"TORCH_OPS_BACKEND": "op=backend", "TORCH_OPS_DISABLE": "op:backend"}


@dataclass(frozen=True)
class Environment:
    """The parsed variables.

    Attributes:
        default: Backend of every op that isn't named, or None.
        per_op: Backend by op.
        disabled: Disabled backends; the key is an op's name, or None for all ops.
        inline: Whether ops dissolve in compiled graphs, or ``"auto"``; keys as of ``disabled``.
        required: Promises that kernels have to make.
        tuning_table: File of the table of measured times, ``"none"``, or None.
    """

    default: Backend | None = None
    per_op: Mapping[str, Backend] = field(default_factory=dict)
    disabled: Mapping[str | None, frozenset[Backend]] = field(default_factory=dict)
    inline: Mapping[str | None, bool | str] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    tuning_table: str | None = None

    def disables(self, op: str, backend: Backend) -> str | None:
        """Give why the backend is disabled for the op, or None."""
        if backend in self.disabled.get(None, ()):
            return f"disabled by TORCH_OPS_DISABLE={backend.value}"
        if backend in self.disabled.get(op, ()):
            return f"disabled by TORCH_OPS_DISABLE={op}:{backend.value}"
        return None


def read(
    ops: Iterable[str],
    environ: Mapping[str, str] | None = None,
    writing: Collection[str] = (),
) -> Environment:
    """Parse the environment.

    Args:
        ops: Names of all known ops.
        environ: Variables, ``os.environ`` by default.
        writing: Those of the ops that write arguments, and so dissolve in no graph.

    Raises:
        UnknownVariableError: a variable, or an op, backend or promise in it, is unknown; names
            the nearest.
    """
    environ = os.environ if environ is None else environ
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in VARIABLES:
            raise UnknownVariableError(
                f"Unknown environment variable {name}={environ[name]!r}. "
                f"Known: {', '.join(VARIABLES)}.{nearest(name, VARIABLES)}",
                variable=name,
            )
    known = sorted(ops)
    default, per_op = _choices(environ.get("TORCH_OPS_BACKEND", ""), known)
    disabled = _disabled(environ.get("TORCH_OPS_DISABLE", ""), known)
    inline = _inline(environ.get("TORCH_OPS_INLINE", ""), known, writing)
    required = _required(environ.get("TORCH_OPS_REQUIRE", ""))
    table = environ.get("TORCH_OPS_TUNING_TABLE", "").strip() or None
    return Environment(default, per_op, disabled, inline, required, table)


def _choices(text: str, ops: list[str]) -> tuple[Backend | None, dict[str, Backend]]:
    default: Backend | None = None
    per_op: dict[str, Backend] = {}
    for part in _parts(text):
        op, equals, backend = part.partition("=")
        if equals:
            per_op[_op("TORCH_OPS_BACKEND", text, op, ops)] = _backend(
                "TORCH_OPS_BACKEND", text, backend
            )
        else:
            default = _backend("TORCH_OPS_BACKEND", text, op)
    return default, per_op


def _disabled(text: str, ops: list[str]) -> dict[str | None, frozenset[Backend]]:
    result: dict[str | None, frozenset[Backend]] = {}
    for part in _parts(text):
        left, colon, right = part.partition(":")
        key = _op("TORCH_OPS_DISABLE", text, left, ops) if colon else None
        backend = _backend("TORCH_OPS_DISABLE", text, right if colon else left)
        result[key] = result.get(key, frozenset()) | {backend}
    return result


def _inline(text: str, ops: list[str], writing: Collection[str]) -> dict[str | None, bool | str]:
    result: dict[str | None, bool | str] = {}
    for part in _parts(text):
        op, equals, mode = part.rpartition("=")
        key = _op("TORCH_OPS_INLINE", text, op, ops) if equals else None
        if mode.strip().lower() not in _MODES:
            raise UnknownVariableError(
                f"TORCH_OPS_INLINE={text!r} says {mode.strip()!r} (accepted: "
                f"{listing(sorted(_MODES))}, for one op op=mode)",
                variable="TORCH_OPS_INLINE",
            )
        result[key] = _MODES[mode.strip().lower()]
        if key in writing and result[key] is True:
            raise UnknownVariableError(
                f"TORCH_OPS_INLINE={text!r}: op {key!r} writes its arguments and stays one call "
                "(accepted: auto, false)",
                variable="TORCH_OPS_INLINE",
            )
    return result


def _required(text: str) -> frozenset[str]:
    required = frozenset(_parts(text))
    for name in sorted(required.difference(PROMISES)):
        raise UnknownVariableError(
            f"TORCH_OPS_REQUIRE={text!r} names the unknown promise {name!r}. "
            f"Known: {listing(PROMISES)}.{nearest(name, PROMISES)}",
            variable="TORCH_OPS_REQUIRE",
        )
    return required


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _op(variable: str, text: str, name: str, ops: list[str]) -> str:
    name = name.strip()
    if name not in ops:
        raise UnknownVariableError(
            f"{variable}={text!r} names the unknown op {name!r}. "
            f"Known: {listing(ops)}.{nearest(name, ops)}",
            variable=variable,
        )
    return name


def _backend(variable: str, text: str, name: str) -> Backend:
    try:
        return Backend(name.strip())
    except ValueError as error:
        hint = f" For one op write {_ONE_OP[variable]}." if set("=:") & set(name) else ""
        raise UnknownVariableError(
            f"{variable}={text!r} names an unknown backend: {error}{hint}", variable=variable
        ) from None
