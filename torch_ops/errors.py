"""Every exception that torch_ops raises on purpose. Imports nothing of the project."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "AmbiguousBackendError",
    "AttentionOverrideError",
    "BackendUnavailableError",
    "CaptureError",
    "DeclarationError",
    "InvalidTargetError",
    "NoBackendError",
    "NoBackwardError",
    "NotPreparedError",
    "PluginConflictError",
    "RegistrationConflictError",
    "TorchOpsError",
    "TuningTableError",
    "UnknownBackendError",
    "UnknownOpError",
    "UnknownVariableError",
]


class TorchOpsError(Exception):
    """Base of all errors of torch_ops; ``str(error)`` is the plain message."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class _DataError(TorchOpsError):
    """Takes keyword arguments that become attributes, so that tools need not parse the text."""

    def __init__(self, message: str = "", **data: Any) -> None:
        super().__init__(message)
        self.__dict__.update(data)


class UnknownOpError(_DataError, KeyError):
    """No kernel is registered under this op name. Attributes: ``op``."""

    op: str


class UnknownBackendError(_DataError, KeyError):
    """The op has no kernel of this backend. Attributes: ``op`` (None for all ops), ``backend``."""

    op: str | None
    backend: str


class NoBackendError(_DataError, ValueError):
    """No candidate may run this call. Attributes: ``op``, ``candidates``."""

    op: str
    candidates: tuple[Any, ...]


class AmbiguousBackendError(_DataError, ValueError):
    """Several backends may run and nothing decides. Attributes: ``op``, ``candidates``."""

    op: str
    candidates: tuple[Any, ...]


class BackendUnavailableError(_DataError, ValueError):
    """The backend that was asked for can't run. Attributes: ``op``, ``backend``, ``reasons``."""

    op: str
    backend: str
    reasons: tuple[str, ...]


class RegistrationConflictError(_DataError, ValueError):
    """Another spec holds this (op, backend). Attributes: ``registered``, ``rejected``."""

    registered: Any
    rejected: Any


class InvalidTargetError(TorchOpsError, ValueError):
    """A kernel target isn't of the form ``module:attr``."""


class DeclarationError(TorchOpsError, TypeError):
    """A declaration, its fake and a backend's function disagree."""


class PluginConflictError(_DataError, ValueError):
    """Two distributions provide one backend name. Attributes: ``backend``, ``distributions``."""

    backend: str
    distributions: tuple[str, ...]


class TuningTableError(TorchOpsError, ValueError):
    """A table of measured times can't be read, or is of another device, version or registry."""


class UnknownVariableError(_DataError, ValueError):
    """A ``TORCH_OPS_*`` variable has an unknown name, op or backend. Attributes: ``variable``."""

    variable: str


class NoBackwardError(_DataError, NotImplementedError):
    """An input requires grad and the op has no backward. Attributes: ``op``."""

    op: str


class AttentionOverrideError(_DataError, ValueError):
    """An override was refused and nothing was changed. Attributes: ``refused`` (layer: reasons)."""

    refused: dict[str, tuple[str, ...]]


class NotPreparedError(TorchOpsError, RuntimeError):
    """A layer's implementation has not been prepared for this device and dtype."""


class CaptureError(TorchOpsError, RuntimeError):
    """Something that allocates, loads or plans was asked for while a stream is capturing."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Give ``" Did you mean 'x'?"`` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def listing(names: Sequence[str]) -> str:
    """Format names for a message: ``'a', 'b'``, or ``none``."""
    return ", ".join(repr(name) for name in names) if names else "none"
