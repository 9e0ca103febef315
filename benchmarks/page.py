"""Write BENCHMARKS.md and its plots from ``benchmarks/results``; a test compares."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import _page_graphs, _page_sections
from benchmarks._bars import bars
from benchmarks._page_sections import Kind

SECTIONS = {**_page_sections.SECTIONS, **_page_graphs.SECTIONS}
ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "BENCHMARKS.md"
HEAD = """# Benchmarks

What was measured, of each kind the last time. Made by `python -m benchmarks page` from
`benchmarks/results`; a test compares. Numbers of one line are of one run on one machine, side by
side: don't compare them across tables. Which kernel was proven right where is in
[SUPPORT.md](SUPPORT.md).
"""


def run() -> dict[str, Any]:
    """Write what `made` gives."""
    files = made()
    for path, text in files.items():
        path.write_text(text)
    return {"benchmark": "page", "files": [str(path.relative_to(ROOT)) for path in files]}


def table(report: dict[str, Any]) -> str:
    """Name what was written."""
    return "\n".join(f"wrote {name}" for name in report["files"])


def made(results: Path = RESULTS, page: Path = PAGE) -> dict[Path, str]:
    """Give the page and its plots: the text of each file.

    Args:
        results: Folder of reports, and of files that hold several of them by name.
        page: Where the page goes.
    """
    plots: dict[Path, str] = {}
    parts = [HEAD]
    for path in sorted(results.glob("*.json")):
        found: dict[str, Any] = json.loads(path.read_text())
        if "benchmark" in found:
            found = {**_machine(found), found["benchmark"]: found}
        parts += _file(found, path, page, plots)
    return {page: "\n".join(parts), **plots}


def _machine(report: Mapping[str, Any]) -> dict[str, Any]:
    return {"machine": report["device"], "versions": report["versions"]}


def _file(found: dict[str, Any], path: Path, page: Path, plots: dict[Path, str]) -> Iterator[str]:
    """Give the page's text about a file, and add its plots."""
    reports = {name: data for name, data in found.items() if isinstance(data, dict)}
    reports.pop("versions", None)
    yield f"## {found['machine']}\n\nFrom `{path.relative_to(page.parent)}`.\n"
    for name, kind in SECTIONS.items():
        if name not in reports:
            continue
        data = reports.pop(name)
        yield f"### {kind.title}\n\n{kind.text}\n\n{_origin(data, found)}\n"
        plot = kind.bars(data)
        if plot is not None:
            target = path.with_name(f"{path.stem}-{name}.svg")
            title = f"{kind.title}, {found['machine']}"
            plots[target] = bars(title, plot.unit, plot.groups, plot.line)
            yield f"![{kind.title}]({target.relative_to(page.parent)})\n"
        yield from _tables(kind, data)
    if reports:
        yield "### Also in this file\n"
        yield "\n".join(f"- `{name}`: {_origin(data, found)}" for name, data in reports.items())
        yield ""


def _tables(kind: Kind, data: Mapping[str, Any]) -> Iterator[str]:
    for one in kind.tables(data):
        head, *lines = ([cell.replace("|", "\\|") for cell in line] for line in one.lines)
        rows = [head, ["---"] * len(head), *lines]
        text = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
        yield f"{one.title}\n\n{text}\n" if one.title else f"{text}\n"


def _origin(data: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Say by which command, when and with what something was measured."""
    versions = data.get("versions") or found["versions"]
    what = data.get("command") or data.get("what")
    facts = [
        f"`{what}`" if str(what).startswith(("python", "pytest")) else what,
        data.get("date") or found.get("date"),
        f"commit {data['commit']}" if "commit" in data else None,
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"copy {data['copy_tb_s']:.3f} TB/s" if "copy_tb_s" in data else None,
        f"since then: {data['changed_since']}" if "changed_since" in data else None,
    ]
    return "; ".join(fact for fact in facts if fact) + "."
