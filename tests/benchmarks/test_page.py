"""``python -m benchmarks page``: BENCHMARKS.md is what the results make, and says where from."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

VERSIONS = {"torch": "2.13.0", "triton": "3.9.0"}
ROW = {"op": "rms_norm", "call": "rms_norm 4x8", "dtype": "float32", "unit": "GB/s"}
CELLS = {"eager": {"us": 4.0, "rate": 1000.0}, "triton": {"us": 2.0, "rate": 2000.0}}
OPS = {"command": "python -m benchmarks ops", "date": "2026-01-02", "copy_tb_s": 4.3, "rows": []}


def made(results: Path, **files: dict[str, Any]) -> dict[str, str]:
    """Page and plots of these files, by name."""
    from benchmarks import page

    for name, found in files.items():
        (results / f"{name}.json").write_text(json.dumps(found))
    return {path.name: text for path, text in page.made(results, results / "B.md").items()}


def test_the_page_and_its_plots_are_not_stale() -> None:
    from benchmarks import page

    for path, text in page.made().items():
        assert path.read_text() == text, f"{path.name}: run: python -m benchmarks page"


def test_the_page_shows_each_result_with_its_origin_and_promises_none(tmp_path: Path) -> None:
    rows = [{**ROW, "bytes": 1 << 27, "selected": "triton", "cells": {**CELLS}}]
    found = {"machine": "A", "versions": VERSIONS, "ops": {**OPS, "rows": rows}, "other": OPS}
    texts = made(tmp_path, a=found)
    page = texts.pop("B.md")
    origin = "`python -m benchmarks ops`; 2026-01-02; torch 2.13.0, triton 3.9.0; copy 4.300 TB/s."
    assert f"{origin}\n\n![Ops side by side](a-ops.svg)" in page
    assert "| call | dtype | `eager` | `triton` |" in page
    assert "| 4x8 | float32 | 4 (1000) | 2 (2000) |" in page
    assert f"- `other`: {origin}" in page
    assert [line for line in page.splitlines() if line.startswith("### ")] == [
        "### Ops side by side",
        "### Also in this file",
    ]
    assert list(texts) == ["a-ops.svg"]


def test_a_report_as_it_is_saved_has_a_file_of_its_own(tmp_path: Path) -> None:
    report = {**OPS, "benchmark": "ops", "device": "B <&>", "versions": VERSIONS}
    report["rows"] = [{**ROW, "bytes": 1 << 27, "cells": {**CELLS}}]
    texts = made(tmp_path, b=report)
    assert "## B <&>" in texts["B.md"]
    svg = "{http://www.w3.org/2000/svg}"
    root = ET.fromstring(texts["b-ops.svg"])
    drawn = [bar.attrib for bar in root.iter(f"{svg}rect") if bar.attrib["height"] != "100%"]
    colors = [bar["fill"] for bar in drawn[:2]]
    # The line is the longest, of 430: a unit takes 100.
    assert [(bar["width"], bar["fill"]) for bar in drawn[2:]] == [
        ("100.0", colors[0]),
        ("200.0", colors[1]),
    ]
    (line,) = root.iter(f"{svg}line")
    assert float(line.attrib["x1"]) == float(drawn[2]["x"]) + 430


def test_small_calls_have_no_bars(tmp_path: Path) -> None:
    rows = [{**ROW, "bytes": 1 << 10, "cells": {**CELLS}}]
    texts = made(tmp_path, a={"machine": "A", "versions": VERSIONS, "ops": {**OPS, "rows": rows}})
    assert list(texts) == ["B.md"]


def test_what_failed_is_shown_as_that(tmp_path: Path) -> None:
    ours = {
        "workload": "b1x1k", "candidate": "ours", "run": "1", "ms": 5.0, "floor_ms": 4.0,
        "ratio": 1.25, "first_token_ms": 30.0, "peak_gib": 17.0, "attention": "triton",
    }  # fmt: skip
    rows = [
        {**ours, "candidate": "transformers compiled", "ms": 6.0, "ratio": 1.5, "attention": ""},
        ours,
        {"workload": "b64x2k", "candidate": "ours", "error": "X: a | b"},
        {"workload": "prefill8k", "candidate": "ours", "error": "Y: c"},
        {"workload": "swap", "candidate": "ours", "error": "Z: d"},
    ]
    report = {"benchmark": "generate", "device": "C", "versions": VERSIONS, "rows": rows}
    texts = made(tmp_path, c=report)
    lines = texts["B.md"].splitlines()
    assert "| b1x1k | ours | 5.00 | 4.00 | 1.25 | 1.20x | 30.0 | 17.0 | triton |" in lines
    assert "| b64x2k | ours | X: a \\| b |  |  |  |  |  |  |" in lines
    assert "| prefill8k | ours | Y: c |  |  |  |" in lines
    assert "| error | Z: d |" in lines
    assert ">b1x1k</text>" in texts["c-generate.svg"]
    assert ">b64x2k</text>" not in texts["c-generate.svg"]
