"""Plots of what ``python -m benchmarks ops`` measured, as SVG that is the same each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks._calls import BACKENDS, EAGER, SELECTED

# Okabe and Ito's colors, which stay apart for color-blind readers.
_COLORS = ("#999999", "#56b4e9", "#0072b2", "#d55e00", "#e69f00", "#009e73", "#000000")
_COLOR = dict(zip((EAGER, *BACKENDS, SELECTED), _COLORS, strict=True))


def draw(report: dict[str, Any], op: str, path: Path) -> None:
    """Draw the rates of an op's calls as bars grouped by call, a color a candidate."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    rows = [row for row in report["rows"] if row["op"] == op]
    names = [n for n in rows[0]["cells"] if any(_rate(row, n) for row in rows)]
    flops = rows[0]["flops"] is not None
    with mpl.rc_context({"svg.hashsalt": "torch_ops", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(max(6.0, 1.1 + 0.16 * len(rows) * (len(names) + 1)), 3.6))
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        width = 1 / (len(names) + 1)
        for index, name in enumerate(names):
            rates = [_rate(row, name) for row in rows]
            places = [at + (index - (len(names) - 1) / 2) * width for at in range(len(rows))]
            axes.bar(places, rates, width, label=name, color=_COLOR.get(name, "#cc79a7"))
        copy = report.get("copy_tb_s")
        if not flops and copy is not None:
            axes.axhline(copy, color="black", linewidth=0.8, linestyle=":", label="copy")
        labels = [f"{row['name']}\n{row['dtype']}" for row in rows]
        axes.set_xticks(range(len(rows)), labels, rotation=30, ha="right", fontsize=8)
        axes.set_ylabel("TFLOP/s" if flops else "TB/s")
        axes.set_title(f"{op}, {report['device']}, torch {report['versions']['torch']}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        figure.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None})


def _rate(row: dict[str, Any], name: str) -> float:
    """Give TFLOP/s or TB/s; nothing is drawn where there is no time."""
    rate: float = row["cells"].get(name, {}).get("rate", 0.0)
    return rate if row["flops"] is not None else rate / 1e3


def ratios(report: dict[str, Any], path: Path) -> None:
    """Draw each call as a line of marks: every candidate's time over the best backend's."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    rows = [row for row in report["rows"] if row["best"] is not None]
    names = list(dict.fromkeys(name for row in rows for name in row["cells"]))
    with mpl.rc_context({"svg.hashsalt": "torch_ops", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(8.0, 1.2 + 0.16 * len(rows)))
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for name in names:
            at = [i for i, row in enumerate(rows) if "ratio" in row["cells"].get(name, {})]
            over = [rows[i]["cells"][name]["ratio"] for i in at]
            marker, size = ("|", 60) if name == SELECTED else ("o", 14)
            color = _COLOR.get(name, "#cc79a7")
            axes.scatter(over, at, s=size, c=color, marker=marker, label=name)
        axes.set_xscale("log", base=2)
        axes.axvline(1.0, color="black", linewidth=0.6)
        axes.set_yticks(range(len(rows)), [row["call"] for row in rows], fontsize=6)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel("time over the best backend's")
        axes.set_title(f"{report['device']}, torch {report['versions']['torch']}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        figure.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None})
