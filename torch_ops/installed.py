"""Whether a package that a backend wraps is there, in a version that it was written for.

Imports nothing of the package: the answer comes from the finder and from its metadata.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys

__all__ = ["lacking"]


def lacking(
    module: str, distribution: str, at_least: str, below: str, install: str = ""
) -> str | None:
    """Give why a package can't be used, for a backend's ``available()``, or None if it can.

    Args:
        module: What is imported, ``"flashinfer"``.
        distribution: What is installed, ``"flashinfer-python"``.
        at_least: The oldest supported release.
        below: The first release that isn't supported any more.
        install: What to do about it; by default to have pip install a release.
    """
    supported = f"(supported: at least {at_least}, below {below})"
    install = install or f"pip install '{distribution}>={at_least},<{below}'"
    if not _found(module):
        return f"not installed: no module named {module!r}; {install}"
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"{distribution} of unknown version: {module!r} has no metadata {supported}"
    release = _release(version)
    if not _release(at_least) <= release < _release(below):
        return f"{distribution} {version} {supported}; {install}"
    return None


def _found(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def _release(version: str) -> tuple[int, ...]:
    """Give ``(0, 6, 13)`` for ``"0.6.13.post1+cu130"``; an empty tuple where there is no number."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
