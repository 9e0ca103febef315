"""The report of ``python -m benchmarks generate``: verdicts, and tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch

_Report = dict[str, Any]
_Row = dict[str, Any]
OURS, EAGER, COMPILED = "ours", "transformers eager", "transformers compiled"
MOST_OVER_FLOOR = {"b1x1k": 1.45, "b16x1k": 1.35, "b64x2k": 1.25}
LEAST_SPEEDUP = {"b64x2k": 4.0}
LEAST_TFLOP_S = 620.0
MOST_SLOW_STEPS = 2  # after a first swap: PyTorch runs a graph once before it records it
LIKE_SWAP = "b16x1k"  # a load of the same size
SLOW = 2.0  # times as long as others
# Of errors of one order, each model's against exact logits, which nobody knows here.
ERRORS_OF_ONE_ORDER = 4


def merged(old: _Report, new: _Report) -> _Report:
    """Add rows to a saved report; a row takes the place of an older one."""
    rows = {(row["workload"], row["candidate"]): row for row in old.get("rows", [])}
    rows |= {(row["workload"], row["candidate"]): row for row in new["rows"]}
    return judged({**new, "rows": list(rows.values())})


def judged(report: _Report) -> _Report:
    """Add limits, where they apply, and whether all hold."""
    checks = list(_checks(report))
    failed = [row for row in report["rows"] if "error" in row]
    ok = bool(report["rows"]) and not failed and all(check["ok"] for check in checks)
    return {**report, "checks": checks, "ok": ok}


def _checks(report: _Report) -> Iterator[dict[str, Any]]:
    rows = {(row["workload"], row["candidate"]): row for row in report["rows"]}
    measured = [row for row in report["rows"] if "error" not in row]
    for row in measured:
        yield from _right(row, rows)
        if row["workload"] == "swap":
            yield from _swap(row, rows.get((LIKE_SWAP, COMPILED), {}))
        if report["shape"] != "tiny" and row["candidate"] == OURS:
            yield from _fast(row, rows)


def _right(row: _Row, rows: dict[tuple[str, str], _Row]) -> Iterator[dict[str, Any]]:
    """Compare our logits with transformers', by how far its own ways are apart."""
    theirs = rows.get((row["workload"], COMPILED), {})
    if row["candidate"].startswith(OURS) and "difference" in row and "difference" in theirs:
        allowed = ERRORS_OF_ONE_ORDER * _apart(theirs)
        yield _check(row, "largest difference of logits", row["difference"], most=allowed)


def _apart(theirs: _Row) -> float:
    """How far transformers' own ways are apart, as a part of the largest logit."""
    return float(theirs.get("difference", 0.0)) + torch.finfo(torch.bfloat16).eps


def _swap(row: _Row, theirs: _Row) -> Iterator[dict[str, Any]]:
    """Compare logits and texts of two backends, by how far transformers' own ways are apart.

    Where texts part, each of the two logits may have moved so far: a gap up to twice that is a tie.
    """
    yield _check(row, f"{COMPILED} of {LIKE_SWAP} beside it", int("difference" in theirs), least=1)
    apart = _apart(theirs)
    yield _check(row, "difference of logits", row["difference"], most=ERRORS_OF_ONE_ORDER * apart)
    yield _check(row, "widest gap where texts part", max(row["gaps"], default=0.0), most=2 * apart)
    yield _check(row, "graphs compiled by swaps", row["compiled"], most=0)
    for name in ("back_is_same", "again_is_same"):
        yield _check(row, name.replace("_", " "), int(row[name]), least=1)
    if row["graphs"]:
        for name, most in (("swapped_ms", MOST_SLOW_STEPS), ("back_ms", 0), ("again_ms", 0)):
            later = statistics.median(row[name][MOST_SLOW_STEPS:])
            slow = sum(ms > SLOW * later for ms in row[name])
            yield _check(row, f"slow steps, {name[:-3]}", slow, most=most)


def _fast(row: _Row, rows: dict[tuple[str, str], _Row]) -> Iterator[dict[str, Any]]:
    workload = row["workload"]
    if workload in MOST_OVER_FLOOR:
        yield _check(row, "step over the floor", row["ratio"], most=MOST_OVER_FLOOR[workload])
    times = speedup(row, rows.get((workload, COMPILED), {}))
    if workload in LEAST_SPEEDUP and times is not None:
        yield _check(row, f"times as fast as {COMPILED}", times, least=LEAST_SPEEDUP[workload])
    if "tflop_s" in row:
        yield _check(row, "TFLOP/s of a prompt", row["tflop_s"], least=LEAST_TFLOP_S)


def speedup(row: _Row, other: _Row) -> float | None:
    """Give how many times faster a row is than another one of the same run, else None."""
    if "ms" not in row or "ms" not in other or row["run"] != other["run"]:
        return None
    return float(round(other["ms"] / row["ms"], 3))


def _check(
    row: _Row, what: str, value: float, *, most: float | None = None, least: float | None = None
) -> dict[str, Any]:
    ok = value <= most if most is not None else least is not None and value >= least
    bound = {"most": most} if most is not None else {"least": least}
    return {"workload": row["workload"], "what": what, "value": value, **bound, "ok": ok}


def table(report: _Report) -> str:
    """Format the report for people."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [f"{report['device']}, {versions}", f"shape {report['shape']}, {report['seconds']} s"]
    for title, grid in grids(report):
        widths = [max(len(line[i]) for line in grid) for i in range(len(grid[0]))]
        lines += ["", title]
        for line in grid:
            cells = [text.ljust(width) for text, width in zip(line, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
    lines += [""] + [f"not measured: {text}" for text in report["not_measured"]]
    lines += [f"left out: {text}" for text in report["left_out"]]
    for check in report["checks"]:
        bound = f"most {check['most']:.4g}" if "most" in check else f"least {check['least']:.4g}"
        verdict = "ok" if check["ok"] else "NOT OK"
        what = f"{check['workload']}: {check['what']}"
        lines.append(f"{verdict:6} {what} {check['value']:.4g} (at {bound})")
    return "\n".join([*lines, "ok" if report["ok"] else "NOT OK"])


def grids(report: _Report) -> Iterator[tuple[str, list[list[str]]]]:
    """Give each table: its title, and its cells with a line of names first."""
    rows = report["rows"]
    by_key = {(row["workload"], row["candidate"]): row for row in rows}
    decode = [row for row in rows if "ratio" in row or _failed(row, "b")]
    if decode:
        yield "decode steps", [_DECODE, *(_decode(row, by_key) for row in decode)]
    prompts = [row for row in rows if "tflop_s" in row or _failed(row, "prefill")]
    if prompts:
        yield "prompts", [_PROMPT, *(_prompt(row) for row in prompts)]
    swaps = [row for row in rows if row["workload"] == "swap"]
    if swaps:
        yield "a swap in the middle of a text", [["what", "value"], *_swaps(swaps[0])]


def _failed(row: _Row, prefix: str) -> bool:
    return "error" in row and str(row["workload"]).startswith(prefix)


_DECODE = [
    "workload", "candidate", "ms a step", "floor ms", "over the floor", "of transformers compiled",
    "first token ms", "peak GiB", "attention",
]  # fmt: skip
_PROMPT = ["workload", "candidate", "ms", "TFLOP/s", "peak GiB", "attention"]


def _decode(row: _Row, by_key: dict[tuple[str, str], _Row]) -> list[str]:
    head = [f"{row['workload']}", row["candidate"]]
    if "error" in row:
        return [*head, row["error"], *[""] * (len(_DECODE) - 3)]
    times = speedup(row, by_key.get((row["workload"], COMPILED), {}))
    return [
        *head, f"{row['ms']:.2f}", f"{row['floor_ms']:.2f}", f"{row['ratio']:.2f}",
        "" if times is None else f"{times:.2f}x", f"{row['first_token_ms']:.1f}", _peak(row),
        row.get("attention", ""),
    ]  # fmt: skip


def _prompt(row: _Row) -> list[str]:
    head = [row["workload"], row["candidate"]]
    if "error" in row:
        return [*head, row["error"], *[""] * (len(_PROMPT) - 3)]
    cells = [f"{row['ms']:.1f}", f"{row['tflop_s']:.3g}", _peak(row), row.get("attention", "")]
    return [*head, *cells]


def _peak(row: _Row) -> str:
    return f"{row['peak_gib']:.1f}" if "peak_gib" in row else ""


def _swaps(row: _Row) -> Iterator[list[str]]:
    if "error" in row:
        yield ["error", row["error"]]
        return
    yield ["from and to", f"{row['from']} to {row['to']}"]
    yield ["preparing it once, ms", f"{row['prepare_ms']}"]
    yield ["overrides, us of host time", ", ".join(map(str, row["override_us"]))]
    yield ["a step before, ms", f"{row['step_ms']}"]
    for name, what in (("swapped_ms", "after the swap"), ("back_ms", "after going back"),
                       ("again_ms", "after swapping again")):  # fmt: skip
        yield [f"first steps {what}, ms", ", ".join(map(str, row[name][:5]))]
    yield ["texts that part", f"{row['parted']} of {row['texts']}"]
    yield ["widest gap of two logits there", f"{max(row['gaps'], default=0.0):.4f} of the largest"]
    yield ["graphs compiled by swaps", f"{row['compiled']}"]
