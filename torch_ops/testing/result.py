"""What a verification came to: cells, verdicts, a table, a dictionary."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PASSED, FAILED, TOO_FEW = "passed", "failed", "too few"
UNSUPPORTED, UNTESTABLE = "unsupported", "untestable"


@dataclass(frozen=True)
class Failure:
    """A broken promise.

    Attributes:
        phase: ``covering``, ``named``, ``zero``, ``classes``, ``generated``, ``opcheck``,
            ``traced``, ``compiled``, ``ledger``, or ``lost`` where the GPU's context was lost,
            which ends the proof.
        layer: ``contract``, ``bound``, ``opcheck``, ``compiled``, ``ledger`` (an entry is stale)
            or the name of a law.
        detail: What was seen.
        spec: The example as JSON; hypothesis has shrunk it in the phase ``generated``.
        again: A command that runs it again.
    """

    phase: str
    layer: str
    detail: str
    spec: str
    again: str

    def __str__(self) -> str:
        return (
            f"[{self.phase}/{self.layer}] {self.detail}\n  spec: {self.spec}\n  again: {self.again}"
        )


@dataclass(frozen=True)
class Cell:
    """The verdict on one op, backend and dtype.

    Attributes:
        dtype: Name of the dtype.
        verdict: ``passed``, ``failed``, ``too few`` (red); ``unsupported``, ``untestable``
            (neither red nor proven).
        reason: Why, for every verdict but ``passed``.
        executed: Examples that ran.
        refused: Examples that the kernel refused beforehand, by reason.
        left_out: Examples left out by a limit on classes of calls.
        ratio: Largest error, as a part of its bound.
        laws: How often each law was checked.
        laws_refused: Laws about calls that the kernel refuses, with the first reason.
        opchecks: How many examples had schema and fake kernel checked by `torch.library.opcheck`.
        failures: Broken promises, the first of each phase.
        tolerated: Examples that failed as the ledger of known faults says, by issue.
        never_launched: Examples that the ledger keeps from running, by issue.
        traced: How many examples were the same after AOT dispatch with dynamic shapes.
        compiled: How many examples were the same in a compiled graph.
    """

    dtype: str
    verdict: str
    reason: str = ""
    executed: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    left_out: int = 0
    ratio: float = 0.0
    laws: dict[str, int] = field(default_factory=dict)
    laws_refused: dict[str, str] = field(default_factory=dict)
    opchecks: int = 0
    failures: tuple[Failure, ...] = ()
    tolerated: dict[str, int] = field(default_factory=dict)
    never_launched: dict[str, int] = field(default_factory=dict)
    traced: int = 0
    compiled: int = 0

    @property
    def red(self) -> bool:
        """Whether the cell makes the result fail."""
        return self.verdict in (FAILED, TOO_FEW)


@dataclass(frozen=True)
class Result:
    """The verdict on one op and backend; `str` is a table."""

    op: str
    backend: str
    device: str
    profile: str
    seconds: float
    versions: dict[str, str]
    cells: tuple[Cell, ...]

    @property
    def ok(self) -> bool:
        """Whether no cell is red and at least one passed: nothing proven is not green."""
        return not any(c.red for c in self.cells) and any(c.verdict == PASSED for c in self.cells)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """All broken promises."""
        return tuple(f for cell in self.cells for f in cell.failures)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain data, for JSON."""
        return {**dataclasses.asdict(self), "ok": self.ok}

    def rows(self) -> list[tuple[str, ...]]:
        """The table: header, then one row a cell."""
        header = (
            "dtype", "verdict", "examples", "refused", "left out", "worst err/bound", "laws",
            "opcheck", "traced", "compiled", "known faults",
        )  # fmt: skip
        return [header, *(_row(cell) for cell in self.cells)]

    def __str__(self) -> str:
        verdict = "passed" if self.ok else "FAILED"
        lines = [
            f"{self.op} on {self.backend} ({self.device}, {self.profile}): {verdict} "
            f"in {self.seconds:.1f} s",
            *_aligned(self.rows()),
        ]
        for cell in self.cells:
            if cell.reason and not cell.failures:
                lines.append(f"{cell.dtype}: {cell.verdict}: {cell.reason}")
            lines += [f"{cell.dtype}: {failure}" for failure in cell.failures]
            for kind in ("tolerated", "never_launched"):
                lines += [
                    f"{cell.dtype}: {count} examples {kind.replace('_', ' ')}: {issue}"
                    for issue, count in getattr(cell, kind).items()
                ]
        if not self.ok and not any(cell.red for cell in self.cells):
            lines.append("no cell was proven: a result without a passed cell is no proof")
        if self.failures:
            named = (f"{name} {version}" for name, version in self.versions.items())
            lines.append(f"versions: {', '.join(named)}")
        return "\n".join(lines)


def _row(cell: Cell) -> tuple[str, ...]:
    held = sum(1 for count in cell.laws.values() if count)
    unheard = sum(1 for name, count in cell.laws.items() if not count)
    refused = f", {unheard} refused" if unheard and cell.verdict == PASSED else ""
    return (
        cell.dtype,
        cell.verdict,
        str(cell.executed),
        str(sum(cell.refused.values())),
        str(cell.left_out),
        f"{cell.ratio:.3f}" if cell.executed else "-",
        f"{held} ({sum(cell.laws.values())} checks){refused}" if cell.laws else "-",
        str(cell.opchecks),
        str(cell.traced),
        str(cell.compiled),
        str(sum(cell.tolerated.values()) + sum(cell.never_launched.values())),
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
