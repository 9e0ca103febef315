"""What the page shows of compiled graphs, training and attention over latents: tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks._page_sections import Kind, Table, grid, number, timed

__all__ = ["SECTIONS"]

_Data = Mapping[str, Any]


def _compile(data: _Data) -> Iterator[Table]:
    rows = []
    for row in data["rows"]:
        cells = {name: f"{number(us)} ({row['kernels'][name]})" for name, us in row["us"].items()}
        ratios = {name: f"{ratio:.3f}" for name, ratio in row["ratios"].items()}
        rows.append(([row["case"], row["mode"]], cells | ratios))
    yield Table("us (kernels that Inductor generated)", grid(["case", "mode"], rows))


def _train(data: _Data) -> Iterator[Table]:
    rows = []
    for row in data["rows"]:
        cells = {
            name: f"{number(cell['us'])} ({cell['kept'] / 1e6:.1f})"
            for name, cell in row["cells"].items()
        }
        rows.append(([row["op"], row["name"], ", ".join(row["ran"])], cells))
    yield Table("us (MB kept for the backward)", grid(["op", "call", "ran"], rows))


def _latents(data: _Data) -> Iterator[Table]:
    rows = [
        ([row["name"]], {n: f"{number(c['us'])} ({number(c['tb_s'])})" for n, c in timed(row)})
        for row in data["rows"]
    ]
    yield Table("us (TB/s)", grid(["heads, sequences x keys"], rows))


def _calls_of_models(data: _Data) -> Iterator[Table]:
    spreads = {n: s for n, s in data["summary"].items() if isinstance(s, dict) and "least" in s}
    head = ["times of", "over", "cells", "geometric mean", "least", "in", "most", "in"]
    lines = []
    for name, spread in spreads.items():
        of = ("selected", "the best") if name == "over_best" else (name, "selected")
        names = ("cells", "mean", "least", "of_least", "worst", "of_worst")
        lines.append([*of, *(number(spread[key]) for key in names)])
    yield Table("ratios", [head, *lines])
    rows = [
        (
            [row["call"], row["selected"] or ""],
            {name: number(cell["us"]) for name, cell in timed(row)},
        )
        for row in data["rows"]
    ]
    yield Table("us", grid(["call", "selected is"], rows))


SECTIONS = {
    "grid": Kind(
        "Calls of models",
        "Decoding and prompts of models, on a GPU replayed from CUDA graphs with a cold L2 cache: "
        "every kernel that is right, and the one that a table of measured times selects, on an "
        "H200 the shipped one. Of paged and packed attention FlashInfer is timed with its plan, "
        "and left out of the ratios.",
        _calls_of_models,
    ),
    "compile": Kind(
        "In compiled graphs",
        "A chain of 32 norms and a block of Llama: small ops by hand, by `custom_op`, by `define` "
        "and `impl`, and ours, as one call each and dissolved.",
        _compile,
    ),
    "train": Kind(
        "Training", "Forward and backward of each op, beside plain PyTorch by hand.", _train
    ),
    "latents": Kind(
        "Decoding over latents", "mla_decode of DeepSeek-V3's sizes, keys in pages of 64.", _latents
    ),
}
