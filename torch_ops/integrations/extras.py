"""One clear line when an optional package is missing."""

from __future__ import annotations

import importlib.util

from torch_ops.errors import TorchOpsError

__all__ = ["MissingExtraError", "require"]


class MissingExtraError(TorchOpsError, ImportError):
    """A package of an extra isn't installed. Attributes: ``packages``, ``command``."""

    def __init__(
        self, message: str = "", packages: tuple[str, ...] = (), command: str = ""
    ) -> None:
        super().__init__(message)
        self.packages = packages
        self.command = command


def require(user: str, packages: tuple[str, ...], command: str) -> None:
    """Raise unless all packages are installed; imports none of them.

    Args:
        user: What needs them, for the message.
        packages: Names to import.
        command: What installs them.

    Raises:
        MissingExtraError: one is missing.
    """
    missing = tuple(name for name in packages if importlib.util.find_spec(name) is None)
    if missing:
        raise MissingExtraError(f"{user} needs {', '.join(missing)}: {command}", missing, command)
