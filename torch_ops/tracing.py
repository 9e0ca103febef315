"""`trace`: which kernel ran, how often, and what was skipped. Costs nothing when off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch_ops import locks
from torch_ops.backend import OpenEnum

__all__ = ["Trace", "TraceRecord", "trace"]

_lock = locks.lock()
_active: list[Trace] = []


@dataclass
class TraceRecord:
    """Calls that went the same way.

    Attributes:
        op: The op's name.
        backend: The `Backend` that ran, for a layer the `AttentionBackend`.
        source: Who chose it.
        count: How many calls.
        skipped: Backends that were preferred and couldn't run, with the reason.
    """

    op: str
    backend: OpenEnum
    source: str
    count: int
    skipped: tuple[tuple[str, str], ...]


class Trace:
    """The calls of all threads while it was open; ``records`` is in order of first call."""

    def __init__(self) -> None:
        self._records: dict[tuple[Any, ...], TraceRecord] = {}

    @property
    def records(self) -> list[TraceRecord]:
        """One record per op, backend, source and list of skipped backends."""
        with _lock:
            return list(self._records.values())

    def _add(
        self, op: str, backend: OpenEnum, source: str, skipped: tuple[tuple[str, str], ...]
    ) -> None:
        key = (op, backend, source, skipped)
        record = self._records.get(key)
        if record is None:
            self._records[key] = TraceRecord(op, backend, source, 1, skipped)
        else:
            record.count += 1

    def __str__(self) -> str:
        rows = [("op", "backend", "source", "calls", "skipped")]
        for record in self.records:
            skipped = "; ".join(f"{name}: {reason}" for name, reason in record.skipped)
            row = (record.op, record.backend.value, record.source, str(record.count), skipped)
            rows.append(row)
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(
            "  ".join([*(row[i].ljust(widths[i]) for i in range(4)), row[4]]).rstrip()
            for row in rows
        )


def active() -> bool:
    """Whether any trace is open."""
    return bool(_active)


def note(op: str, backend: OpenEnum, source: str, skipped: Sequence[tuple[OpenEnum, str]]) -> None:
    """Add one call to every open trace."""
    pairs = tuple((name.value, reason) for name, reason in skipped)
    with _lock:
        for opened in _active:
            opened._add(op, backend, source, pairs)


@contextmanager
def trace() -> Iterator[Trace]:
    """Record the calls of all threads in a ``with`` block, eager and compiled.

    Calls that a CUDA graph replays run no Python and aren't counted, and neither are those that
    have dissolved in a compiled graph, see `torch_ops.set_inline`.

    Returns:
        A context manager that gives the `Trace`.
    """
    from torch_ops import policy

    policy.refuse_in_traced_code("trace")
    opened = Trace()
    with _lock:
        _active.append(opened)
    policy.invalidate()
    try:
        yield opened
    finally:
        with _lock:
            _active[:] = [other for other in _active if other is not opened]
        policy.invalidate()
