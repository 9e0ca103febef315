"""What a run of the serving demo found out, for people and as data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from torch_ops.demo.report import OpCalls, aligned

__all__ = ["ServeReport"]


@dataclass(frozen=True)
class ServeReport:
    """What came of it; ``str()`` is for people, its last line is ``serve-demo: {json}``.

    Attributes:
        device: Where it ran.
        requests: How many were served.
        cancelled: Which one was cancelled in the second run, and after how many tokens; None where
            all answers were too short for that.
        swaps: Target, and the step before which all layers were swapped to it.
        changed: Requests whose tokens differ between the runs, and not by a tie.
        ties: Requests whose tokens differ from a tie on.
        evictions: How often a request had to make room and was run again.
        leaked: Pages that were not free in the end.
        calls: Calls per op, backend and source in the second run.
        tokens: Tokens answered in the second run.
        seconds: How long it took.
        answers: Some questions with their answers.
    """

    device: str
    requests: int
    cancelled: tuple[int, int] | None
    swaps: tuple[tuple[str, int], ...]
    changed: tuple[int, ...]
    ties: tuple[int, ...]
    evictions: int
    leaked: int
    calls: tuple[OpCalls, ...]
    tokens: int
    seconds: float
    answers: tuple[tuple[str, str], ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was lost and the swaps took effect."""
        swapped = any(call.op == "attention" and call.source == "layer" for call in self.calls)
        return not self.changed and not self.leaked and swapped

    @property
    def attention(self) -> tuple[str, ...]:
        """Backends that served attention."""
        return tuple(sorted({call.backend for call in self.calls if call.op == "attention"}))

    @property
    def data(self) -> dict[str, Any]:
        """The figures, as plain data."""
        return {
            "device": self.device,
            "requests": self.requests,
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens / self.seconds, 2),
            "cancelled": None if self.cancelled is None else self.cancelled[0],
            "swaps": [{"to": target, "before_step": step} for target, step in self.swaps],
            "changed": list(self.changed),
            "ties": list(self.ties),
            "evictions": self.evictions,
            "pages_leaked": self.leaked,
            "attention": list(self.attention),
            "calls": [vars(call) for call in self.calls],
        }

    def __str__(self) -> str:
        lost = f"requests {list(self.changed)} changed" if self.changed else "no other one changed"
        who = "none, answers were too short"
        if self.cancelled is not None:
            who = "request {} after {} tokens".format(*self.cancelled)
        figures = [
            ("tokens/s", f"{self.tokens / self.seconds:.1f} ({self.tokens} tokens)"),
            ("cancelled", f"{who}; {lost}"),
            ("another token from a tie on", str(len(self.ties))),
            ("evictions", str(self.evictions)),
            ("pages not freed", str(self.leaked)),
        ]
        return "\n\n".join(
            [
                "\n".join(f"{question}  {answer}" for question, answer in self.answers),
                aligned(
                    "Which kernel ran how often",
                    ("op", "backend", "chosen by", "calls"),
                    [(call.op, call.backend, call.source, str(call.calls)) for call in self.calls],
                ),
                aligned(
                    "Swaps",
                    ("all layers to", "before step"),
                    [(target, str(step)) for target, step in self.swaps],
                ),
                aligned(f"{self.requests} requests on {self.device}", ("what", "value"), figures),
                "All as required." if self.ok else "NOT as required.",
                f"serve-demo: {json.dumps(self.data)}",
            ]
        )
