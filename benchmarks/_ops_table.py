"""The report of ``python -m benchmarks ops`` for people: an aligned table an op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks._work import Work

_Row = dict[str, Any]


def table(report: dict[str, Any]) -> str:
    """Format the report: microseconds and rate by candidate, a star at the best backend."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    copy = report.get("copy_tb_s")
    lines = [
        f"{report['device']}, {versions}",
        f"copy {'not measured' if copy is None else f'{copy:.3f} TB/s'}, {report['seconds']} s, "
        f"load {report['load'][0]} before and {report['load_after'][0]} after",
    ]
    for op in dict.fromkeys(row["op"] for row in report["rows"]):
        lines += _op(op, [row for row in report["rows"] if row["op"] == op])
    lines += [f"compiling ahead: {text[:200]}" for text in report.get("ahead", ())]
    lines += [f"not measured: {text}" for text in report["not_measured"]]
    return "\n".join([*lines, "ok" if report["ok"] else "NOT OK"])


def amount(size: Work) -> str:
    """Spell how much work a call is."""
    flops = "" if size.flops is None else f" and {size.flops / 1e9:.3g} GFLOP"
    return f"{size.bytes / 1e6:.3g} MB{flops}"


def _op(op: str, rows: Sequence[_Row]) -> Iterator[str]:
    names = list(rows[0]["cells"])
    grid = [["call", "dtype", "work", *names, "of bound"]]
    for row in rows:
        errors = [cell.get("error", 0.0) for cell in row["cells"].values()]
        cells = [_cell(row, name) for name in names]
        work = amount(Work(row["bytes"], row["flops"]))
        grid.append([row["name"], row["dtype"], work, *cells, f"{max(errors, default=0):.3f}"])
    widths = [max(len(line[i]) for line in grid) for i in range(len(grid[0]))]
    yield f"\n{op}: us and {rows[0]['unit']}, * best backend, x over the best"
    for line in grid:
        cells = [text.ljust(width) for text, width in zip(line, widths, strict=True)]
        yield "  ".join(cells).rstrip()
    yield from _notes(rows)


def _cell(row: _Row, name: str) -> str:
    cell = row["cells"][name]
    if "us" not in cell:
        return str(cell["state"]).upper() if cell["red"] else str(cell["state"])
    rate = f"{cell['rate']:.0f}" if cell["rate"] >= 100 else f"{cell['rate']:.3g}"
    text = f"{cell['us']:.2f} {rate}{'*' if name == row['best'] else ''}"
    if name == "selected":
        text += f" {row['selected']}" + (f" {cell['ratio']:.2f}x" if "ratio" in cell else "")
    return text


def _notes(rows: Sequence[_Row]) -> Iterator[str]:
    """Say once why a candidate has no time, with the calls that it holds for."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for name, cell in row["cells"].items():
            if cell["reason"]:
                state = str(cell["state"]).upper() if cell["red"] else str(cell["state"])
                calls = found.setdefault((name, state, cell["reason"]), [])
                calls.append(f"{row['name']} {row['dtype']}")
    for (name, state, reason), calls in found.items():
        where = "all calls" if len(calls) == len(rows) else ", ".join(calls)
        yield f"  {name} {state}: {reason} ({where})"
