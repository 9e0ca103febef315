"""What the page shows of each kind of result: tables, and bars."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import _generation_table
from benchmarks._bars import Groups

__all__ = ["SECTIONS", "Bars", "Kind", "Table", "grid", "number", "timed"]

_Data = Mapping[str, Any]
LARGE = 1 << 26  # bytes; of smaller calls a launch takes more than the memory
_TILES = re.compile(r"^[a-z]*-?\d+(-\d+)+$")  # names of tile sizes, which nobody chooses


class Table(NamedTuple):
    """Cells, with a line of names first.

    Attributes:
        title: Above it, empty where it is the only one.
        lines: All of equal length.
    """

    title: str
    lines: Sequence[Sequence[str]]


class Bars(NamedTuple):
    """A plot.

    Attributes:
        unit: Of its numbers.
        groups: As `_bars.bars` takes them.
        line: Name and place of a line across.
    """

    unit: str
    groups: Groups
    line: tuple[str, float] | None = None


class Kind(NamedTuple):
    """A kind of result.

    Attributes:
        title: Heading.
        text: What is measured.
        tables: Makes tables of the data.
        bars: Makes a plot of them, or None.
    """

    title: str
    text: str
    tables: Callable[[_Data], Iterator[Table]]
    bars: Callable[[_Data], Bars | None] = lambda _: None


def number(value: object) -> str:
    """Give a value as text: four digits of a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def grid(first: Sequence[str], rows: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> Any:
    """Give lines whose columns are all names that a row has, in the order of their appearance."""
    names = list(dict.fromkeys(name for _, cells in rows for name in cells))
    head = [*first, *(f"`{name}`" for name in names)]
    return [head, *([*labels, *(cells.get(name, "") for name in names)] for labels, cells in rows)]


def _generate(data: _Data) -> Iterator[Table]:
    for title, lines in _generation_table.grids(dict(data)):
        yield Table(title, lines)


def _generate_bars(data: _Data) -> Bars | None:
    over: dict[str, dict[str, float]] = {}
    for row in data["rows"]:
        if "ratio" in row:
            over.setdefault(row["workload"], {})[row["candidate"]] = row["ratio"]
    groups = list(over.items())
    return Bars("times the floor of reading memory once", groups, ("floor", 1.0)) if over else None


def _ops(data: _Data) -> Iterator[Table]:
    for op in dict.fromkeys(row["op"] for row in data["rows"]):
        own = [row for row in data["rows"] if row["op"] == op]
        rows = []
        for row in own:
            cells = {n: f"{number(c['us'])} ({number(c['rate'])})" for n, c in timed(row)}
            if row.get("selected") and "selected" in cells:
                cells["selected"] += f" {row['selected']}"
            rows.append(([row.get("name") or _call(row), row["dtype"]], cells))
        yield Table(f"{op}: us ({own[0]['unit']})", grid(["call", "dtype"], rows))


def _call(row: _Data) -> str:
    return str(row["call"]).removeprefix(f"{row['op']} ")


def timed(row: _Data) -> Iterator[tuple[str, _Data]]:
    """Give the cells of a row that have a time, by name."""
    return ((name, cell) for name, cell in row["cells"].items() if "us" in cell)


def _ops_bars(data: _Data) -> Bars | None:
    groups = [
        (f"{row['op']} {_call(row)}", {n: c["rate"] / 1e3 for n, c in timed(row) if n != "torch"})
        for row in data["rows"]
        if row["unit"] == "GB/s" and row["bytes"] >= LARGE
    ]
    return Bars("TB/s", groups, ("copy", data["copy_tb_s"])) if groups else None


def _rows(data: _Data) -> Iterator[Table]:
    rows = []
    for case in data["cases"]:
        times = {n: v for n, v in case.items() if isinstance(v, float)}
        cells = {n: f"{number(us)} ({case['bytes'] / us / 1e6:.2f})" for n, us in times.items()}
        rows.append(([case["case"]], cells))
    yield Table("us (TB/s)", grid(["call"], rows))


def _attention_cases(data: _Data) -> dict[str, dict[str, _Data]]:
    cases: dict[str, dict[str, _Data]] = {}
    for case in data["cases"]:
        if not _TILES.match(case["kernel"]):
            name = "triton" if case["kernel"] == "chosen" else case["kernel"]
            cases.setdefault(case["case"], {})[name] = case
    return cases


def _attention(data: _Data) -> Iterator[Table]:
    rows = [
        ([case], {n: f"{number(c['us'])} ({number(c['tflop_s'])})" for n, c in kernels.items()})
        for case, kernels in _attention_cases(data).items()
    ]
    yield Table("us (TFLOP/s)", grid(["batch, queries x keys, heads, head_dim"], rows))


def _attention_bars(data: _Data) -> Bars | None:
    groups = [
        (case.replace(" h32/8 d128 bf16", ""), {n: c["tflop_s"] for n, c in kernels.items()})
        for case, kernels in _attention_cases(data).items()
        if len(kernels) > 1
    ]
    return Bars("TFLOP/s", groups) if groups else None


def _paged(data: _Data) -> Iterator[Table]:
    rows = [
        ([row["op"], row["call"]],
         {n: f"{number(c['us'])} ({number(c['tb_s'])})" for n, c in timed(row)})
        for row in data["rows"]
    ]  # fmt: skip
    yield Table("us (TB/s of keys and values)", grid(["op", "call"], rows))


def _paged_bars(data: _Data) -> Bars | None:
    groups = [
        (row["call"], {n: c["tb_s"] for n, c in timed(row) if n != "torch"}) for row in data["rows"]
    ]
    return Bars("TB/s", groups, ("copy", data["copy_tb_s"])) if groups else None


def _decode_step(data: _Data) -> Iterator[Table]:
    lines = [[f"ms a step, {name}", number(ms)] for name, ms in data["ms"].items()]
    swap = data["swap"]
    lines += [
        ["over the hard-wired kernel", number(data["ratio"])],
        ["largest difference of outputs", number(data["difference"])],
        ["layers, batch x length", f"{data['layers']}, {data['batch']} x {data['length']}"],
        ["backend, and swapped to", f"{data['backend']}, {swap['to']}"],
    ]
    for name, what in (
        ("override_us", "override, us of host time"),
        ("first_step_ms", "first step after it, ms"),
        ("step_ms", "later steps, ms"),
    ):
        lines.append([f"{what}: there and back, three times", _listed(swap[name])])
    yield Table("", [["what", "value"], *lines])


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(map(number, numbers))


def _swap(data: _Data) -> Iterator[Table]:
    head = ["mode", "compiled", "right", "us", "us, one kernel hard-wired", "ratio", "graphs"]
    yield Table("", [head, *(
        [
            row["mode"], "layer by layer" if row["apart"] else "whole", str(row["right"]).lower(),
            number(row["us"]), number(row["native_us"]), number(row["ratio"]),
            _listed(row["graphs"]),
        ]
        for row in data["rows"]
    )])  # fmt: skip


def _eager_cost(data: _Data) -> Iterator[Table]:
    head = ["op", "backend", "mode", "kernel alone", "operator over it", "callable over it"]
    lines = [
        [row["op"], row["backend"], row["mode"], *map(number, (row["direct_us"], *_over(row)))]
        for row in data["eager"]
    ]
    yield Table("one eager call, us of host time", [head, *lines])
    columns = ("calls", "direct_us", "op_us", "ratio")
    lines = [
        [row["op"], row["backend"], *(number(row[name]) for name in columns)]
        for row in data["compiled"]
    ]
    head = ["op", "backend", "calls", "kernels alone", "ops", "ratio"]
    yield Table("a compiled chain, us", [head, *lines])


def _over(row: _Data) -> tuple[object, object]:
    return row["over_us"].get("operator", ""), row["over_us"].get("callable", "")


def _by_name(data: _Data) -> Iterator[Table]:
    rows = [
        ([call], {n: f"{number(us)}{_rate(found, n)}" for n, us in found["us"].items()})
        for call, found in data["us_and_tb_s"].items()
    ]
    yield Table("us (TB/s)", grid(["call"], rows))


def _rate(found: _Data, name: str) -> str:
    rate = found.get("tb_s", {}).get(name)
    return f" ({number(rate)})" if rate else ""


def _products(data: _Data) -> Iterator[Table]:
    rows = [
        ([call], {"triton" if n == "chosen" else n: number(us)
                  for n, us in found.items() if not _TILES.match(n)})
        for call, found in data["us"].items()
    ]  # fmt: skip
    yield Table("us", grid(["call"], rows))


def _norms(data: _Data) -> Iterator[Table]:
    shown = [row for row in data["rows"] if row["kernel"].endswith("op's")]
    copies = {row["rows"]: row for row in data["rows"] if row["kernel"] == "copy"}
    lines = [
        [
            row["rows"], row["kernel"].removesuffix(" op's"), number(row["us"]),
            number(row["tb_s"]), number(copies.get(row["rows"], {}).get("tb_s", "")),
        ]
        for row in shown
    ]  # fmt: skip
    yield Table("", [["rows", "norm", "us", "TB/s", "TB/s of a copy"], *lines])


SECTIONS = {
    "generate": Kind(
        "Generating with a transformers model",
        "A model of Llama-3.1-8B's shape with random bfloat16 weights: transformers as it is, "
        "transformers' compiled static cache, and `accelerate(model)` with a paged cache, in one "
        "run. The floor is reading all weights, keys and values once at the rate of a copy.",
        _generate,
        _generate_bars,
    ),
    "ops": Kind(
        "Ops side by side",
        "Every kernel of an op on the same arguments, each checked against the float64 oracle "
        "first; `selected` is what torch_ops chooses.",
        _ops,
        _ops_bars,
    ),
    "rows": Kind(
        "Norms, gates and rotary embeddings", "The Triton kernels beside other libraries'.", _rows),
    "norms_of_many_rows": Kind(
        "Norms of many rows", "The Triton kernels that are launched, beside a copy.", _norms
    ),
    "attention": Kind(
        "Attention", "Dense calls; `triton` is what the backend chooses.", _attention,
        _attention_bars,
    ),
    "paged": Kind(
        "Paged decode", "One query of each sequence, keys in pages of 16.", _paged, _paged_bars
    ),
    "quantize_route_sample": Kind(
        "Quantization, routing and sampling", "Kernels called directly.", _by_name
    ),
    "scaled_mm": Kind("Scaled products", "Kernels called directly.", _products),
    "decode_step": Kind(
        "A decode step that can be swapped",
        "A whole model on the ops under CUDA graphs, against the same kernel hard-wired.",
        _decode_step,
    ),
    "attention_swap": Kind(
        "Swaps in compiled code", "Attention layers, right at once after every swap.", _swap
    ),
    "eager_cost": Kind("The cost of a call", "What an op adds to calling its kernel.", _eager_cost),
}  # fmt: skip
