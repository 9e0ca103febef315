"""Progress on stderr: a spinner of rich on a terminal, else one plain line per step."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

__all__ = ["Progress", "Silent"]


class Progress:
    """Shows what is being done while it lasts, and how long it took."""

    def __init__(self) -> None:
        self._console = _terminal()
        self._status: Any = None

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Show a step; nothing of it is left on the screen but one line."""
        begun = time.perf_counter()
        if self._console is None:
            self._write(f"{what} ...")
        with self._spinner(what) as self._status:
            yield
        self._status = None
        self._write(f"{what}: {time.perf_counter() - begun:.1f} s")

    def note(self, what: str) -> None:
        """Say how far the current step has come."""
        if self._status is not None:
            self._status.update(what)

    def _spinner(self, what: str) -> Any:
        return nullcontext() if self._console is None else self._console.status(what)

    def _write(self, line: str) -> None:
        if self._console is not None:
            self._console.print(line, style="dim", highlight=False, markup=False)
        else:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()


class Silent(Progress):
    """Shows nothing."""

    def __init__(self) -> None:
        self._console = None
        self._status = None

    def _write(self, line: str) -> None:
        """Say nothing."""


def _terminal() -> Any:
    """A console of rich on stderr if that is a terminal and rich is installed, else None."""
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        if error.name != "rich":
            raise
        return None
    return Console(stderr=True)
