"""What a run of the demo found out, for people and as data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch_ops.tracing import Trace

__all__ = ["LayerBackends", "OpCalls", "Report", "Swapped", "aligned", "op_calls"]

MAX_GRAPHS = 4
MAX_LOGIT_DIFF = 1e-3
MIN_SPEED = 0.95


@dataclass(frozen=True)
class OpCalls:
    """Calls of one op during the answer."""

    op: str
    backend: str
    source: str
    calls: int


def op_calls(seen: Trace) -> tuple[OpCalls, ...]:
    """Sum what a trace has seen, however it went: run, inlined or replayed."""
    sums = Counter[tuple[str, str, str]]()
    for record in seen.records:
        sums[record.op, record.backend.value, record.source] += record.count
    return tuple(OpCalls(*names, count) for names, count in sums.items())


@dataclass(frozen=True)
class LayerBackends:
    """What an attention layer ran before the swap, during it and after it was taken back."""

    name: str
    before: str
    during: str
    after: str


@dataclass(frozen=True)
class Swapped:
    """One change of attention backends between two tokens, and what it cost."""

    what: str
    after_tokens: int
    graphs: int


@dataclass(frozen=True)
class Report:
    """The demo's findings; ``str()`` is the readable report, its last line is ``demo: {json}``.

    Attributes:
        question: What was asked.
        answer: What the compiled, accelerated model answered.
        expected: Text that the answer has to contain, or None.
        calls: Calls per op, backend and source while answering.
        layers: Backends of each attention layer.
        swaps: Swaps in order.
        graph_breaks: Graph breaks of the accelerated model.
        graphs_before: Graphs compiled before the first swap.
        graphs_after: Graphs compiled in all.
        max_logit_diff: Largest difference from the untouched model's logits on the same tokens.
        unexplained: Tokens that differ from the untouched model's choice by more than that.
        tokens_per_s: Speed of the accelerated, compiled model.
        baseline_eager_tokens_per_s: Speed of the untouched model.
        baseline_compiled_tokens_per_s: Speed of the untouched model, compiled, static cache.
        measured_tokens: Tokens per measurement.
        acceleration: What was replaced, as a table.
    """

    question: str
    answer: str
    expected: str | None
    calls: tuple[OpCalls, ...]
    layers: tuple[LayerBackends, ...]
    swaps: tuple[Swapped, ...]
    graph_breaks: int
    graphs_before: int
    graphs_after: int
    max_logit_diff: float
    unexplained: int
    tokens_per_s: float
    baseline_eager_tokens_per_s: float
    baseline_compiled_tokens_per_s: float
    measured_tokens: int
    acceleration: str

    @property
    def data(self) -> dict[str, Any]:
        """The figures, as plain data."""
        attention = [name for layer in self.layers for name in (layer.before, layer.during)]
        return {
            "answer": self.answer,
            "graph_breaks": self.graph_breaks,
            "graphs_compiled": self.graphs_after,
            "recompiles_after_swap": sum(swap.graphs for swap in self.swaps),
            "max_logit_diff": self.max_logit_diff,
            "tokens_per_s": round(self.tokens_per_s, 2),
            "baseline_eager_tokens_per_s": round(self.baseline_eager_tokens_per_s, 2),
            "baseline_compiled_tokens_per_s": round(self.baseline_compiled_tokens_per_s, 2),
            "ops": {call.op: call.backend for call in self.calls if call.op != "attention"},
            "attention": sorted(set(attention)),
        }

    @property
    def problems(self) -> tuple[str, ...]:
        """What is not as it should be; empty for a good run."""
        return tuple(self._problems())

    @property
    def ok(self) -> bool:
        """Whether everything is as it should be."""
        return not self.problems

    def _problems(self) -> Iterator[str]:
        if self.expected is not None and self.expected not in self.answer:
            yield f"the answer doesn't name {self.expected}"
        if self.graph_breaks:
            yield f"{self.graph_breaks} graph breaks"
        if self.graphs_after > MAX_GRAPHS:
            yield f"{self.graphs_after} graphs were compiled, at most {MAX_GRAPHS} are due"
        for number, swap in enumerate(self.swaps):
            if swap.graphs > (number == 0):
                yield f"swap {number + 1} compiled {swap.graphs} graphs"
        if not self.max_logit_diff <= MAX_LOGIT_DIFF:
            yield f"logits differ by {self.max_logit_diff:.1e}, at most {MAX_LOGIT_DIFF:.0e} is due"
        if self.unexplained:
            yield f"{self.unexplained} tokens differ from the untouched model's, and not by a tie"

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is worth a second run: times of one run say little on a busy machine."""
        if self.tokens_per_s < MIN_SPEED * self.baseline_compiled_tokens_per_s:
            return ("Slower than the untouched model compiled: is the machine busy?",)
        return ()

    def __str__(self) -> str:
        parts = [
            f"Question: {self.question}\nAnswer: {self.answer}",
            f"What runs on torch_ops\n{_indent(self.acceleration)}",
            aligned(
                "Calls while answering (with all swaps)",
                ("op", "backend", "chosen by", "calls"),
                [(call.op, call.backend, call.source, str(call.calls)) for call in self.calls],
            ),
            aligned(
                "Attention backend per layer",
                ("layer", "before", "during", "after"),
                [(layer.name, layer.before, layer.during, layer.after) for layer in self.layers],
            ),
            aligned(
                "Swaps",
                ("swap", "after token", "graphs compiled"),
                [(swap.what, str(swap.after_tokens), str(swap.graphs)) for swap in self.swaps],
            ),
            self._figures(),
            "All as required." if self.ok else "NOT as required: " + "; ".join(self.problems),
            *self.remarks,
            f"demo: {json.dumps(self.data)}",
        ]
        return "\n\n".join(parts)

    def _figures(self) -> str:
        against = self.tokens_per_s / self.baseline_compiled_tokens_per_s
        return aligned(
            "Figures",
            ("what", "value"),
            [
                ("graph breaks", str(self.graph_breaks)),
                ("graphs compiled before the first swap", str(self.graphs_before)),
                ("graphs compiled in all", str(self.graphs_after)),
                ("largest difference of a logit", f"{self.max_logit_diff:.2e}"),
                ("tokens that differ beyond it", str(self.unexplained)),
                (f"tokens/s over {self.measured_tokens} tokens", f"{self.tokens_per_s:.1f}"),
                ("untouched, eager", f"{self.baseline_eager_tokens_per_s:.1f}"),
                (
                    "untouched, compiled, static cache",
                    f"{self.baseline_compiled_tokens_per_s:.1f} ({against:.2f} times that)",
                ),
            ],
        )


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def aligned(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of text under a title, their columns aligned."""
    lines = [tuple(columns), *(tuple(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    body = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "\n".join([title, *(f"  {line}" for line in body)])
