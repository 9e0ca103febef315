"""How a command shows its result: JSON, plain text for a pipe, colors for a terminal."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch_ops.errors import TorchOpsError

__all__ = ["Report", "Table", "fail", "present"]

_GOOD = frozenset({"yes", "verified", "imported", "passed"})
_BAD = frozenset({"no", "failed"})
_HIGHLIGHTS = {
    r"(?m)^-> .*$": "bold",
    r"\busable\b|\bpassed\b": "green",
    r"\bnot usable\b|\bfailed\b|\bwould raise\b": "red",
}


@dataclass(frozen=True)
class Table:
    """Rows of text under a title; the last column may be long."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def plain(self) -> str:
        """Align the columns with spaces, one row a line."""
        lines = [tuple(self.columns), *(tuple(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        body = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
        return "\n".join([self.title, *(f"  {line}" for line in body)])


@dataclass(frozen=True)
class Report:
    """What a command found out: ``data`` for ``--json``, ``parts`` for people."""

    data: dict[str, Any]
    parts: Sequence[Table | str]
    ok: bool = True


def present(gather: Callable[[], Report], as_json: bool) -> None:
    """Gather a report and print it.

    Raises:
        SystemExit: with code 1 after a `TorchOpsError` or for a report that isn't ok.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what kernels print is no part of a report
            report = gather()
    except TorchOpsError as error:
        fail(error, as_json)
    if as_json:
        print_json(report.data)
    elif sys.stdout.isatty():
        _print_colored(report)
    else:
        _print_plain("\n\n".join(p if isinstance(p, str) else p.plain() for p in report.parts))
    if not report.ok:
        sys.exit(1)


def fail(error: TorchOpsError, as_json: bool) -> NoReturn:
    """Print the message of an error to stderr, with ``--json`` also as JSON, and exit with 1."""
    if as_json:
        print_json({"error": {"type": type(error).__name__, "message": str(error)}})
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    sys.exit(1)


def print_json(data: dict[str, Any]) -> None:
    """Print one JSON object, the only thing on stdout; an infinity is its name there."""
    sys.stdout.write(json.dumps(_finite(data), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """Replace what JSON can't hold: infinities and NaN become text."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _print_plain(text: str) -> None:
    sys.stdout.write(text + "\n")


def _print_colored(report: Report) -> None:
    from rich.console import Console

    console = Console()
    for number, part in enumerate(report.parts):
        if number:
            console.print()
        if isinstance(part, str):
            console.print(_rich_text(part), soft_wrap=True)  # a line stays one line
        else:
            console.print(_rich_table(part))


def _rich_text(part: str) -> Any:
    from rich.text import Text

    text = Text(part)
    for pattern, style in _HIGHLIGHTS.items():
        text.highlight_regex(pattern, style)
    return text


def _rich_table(table: Table) -> Any:
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(title=table.title, title_justify="left", title_style="bold", box=None)
    for column in table.columns:
        drawn.add_column(column, header_style="bold cyan", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell, style=_style(cell)) for cell in row))
    return drawn


def _style(cell: str) -> str:
    if cell in _GOOD:
        return "green"
    return "red" if cell in _BAD else ""
