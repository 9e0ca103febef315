"""`trace`: which kernel ran, how often, and what was skipped. Costs nothing when off."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function

from torch_ops import locks
from torch_ops.backend import OpenEnum

__all__ = ["FusedRecord", "Trace", "TraceRecord", "UncountedRecord", "trace"]

RAN, REPLAYED, INLINED = "ran", "replayed", "inlined"
_KEPT = 4096  # events of slow ways, of which reasons name values; more start anew
lock = locks.lock()
open_counts: list[dict[Event, int]] = []
"""What the open traces have counted; changed under the lock."""
_events: dict[Way, Event] = {}
_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


@dataclass
class TraceRecord:
    """Calls that went the same way.

    Attributes:
        op: The op's name.
        backend: The `Backend` that ran, for a layer the `AttentionBackend`.
        source: Who chose it; ``"forward"`` of a backward: it runs where forward ran.
        count: How many calls.
        skipped: Backends that were preferred and couldn't run, with the reason.
        how: ``"ran"``: its kernel was called; ``"replayed"``: a CUDA graph that holds its kernel
            was replayed; ``"inlined"``: it has dissolved in a compiled graph that ran, as
            `torch_ops.set_inline` says.
    """

    op: str
    backend: OpenEnum
    source: str
    count: int
    skipped: tuple[tuple[str, str], ...]
    how: str = RAN


@dataclass
class FusedRecord:
    """Pairs of calls in whose place one call ran; `Trace.records` has that one.

    Attributes:
        name: The pass, and the op that stands for the pair.
        calls: The two, ``"add"`` being PyTorch's own.
        count: How many pairs.
    """

    name: str
    calls: tuple[str, str]
    count: int


@dataclass
class UncountedRecord:
    """Calls of which a trace can't tell whether they ran, or on what.

    Attributes:
        op: The op's name, None where it isn't known either.
        count: How many calls, None where it isn't known.
        reason: Why.
    """

    op: str | None
    count: int | None
    reason: str


class Way(NamedTuple):
    """How a call went: the fields of `TraceRecord`, less the count."""

    op: str
    backend: OpenEnum
    source: str
    skipped: tuple[tuple[str, str], ...]
    how: str


class Event:
    """What happens at once, and is counted as one: a call, or a run of a compiled graph.

    Told apart by identity, so that counting one costs a look-up.

    Attributes:
        calls: Ways that calls go, with how many.
        fused: Pairs that were fused, with how many.
        uncounted: Op and reason of calls that nothing is known of, with how many.
    """

    __slots__ = ("calls", "fused", "uncounted")

    def __init__(
        self,
        calls: Counter[Way],
        fused: Counter[tuple[str, tuple[str, str]]] | None = None,
        uncounted: Counter[tuple[str | None, str]] | None = None,
    ) -> None:
        self.calls = calls
        self.fused = fused or Counter()
        self.uncounted = uncounted or Counter()


class Trace:
    """The calls of all threads while it was open; ``records`` is in order of first call."""

    def __init__(self) -> None:
        self._counts: dict[Event, int] = {}

    @property
    def records(self) -> list[TraceRecord]:
        """One record per op, backend, source, list of skipped backends, and how it went."""
        found = self._sum(lambda event: event.calls)
        return [
            TraceRecord(way.op, way.backend, way.source, count, way.skipped, way.how)
            for way, count in found.items()
        ]

    @property
    def fused(self) -> list[FusedRecord]:
        """One record per pass of `torch_ops.fusion`, for compiled graphs that ran."""
        found = self._sum(lambda event: event.fused)
        return [FusedRecord(name, calls, count) for (name, calls), count in found.items()]

    @property
    def uncounted(self) -> list[UncountedRecord]:
        """What may be missing in ``records``; empty where nothing is."""
        found = self._sum(lambda event: event.uncounted)
        return [UncountedRecord(op, count or None, reason) for (op, reason), count in found.items()]

    def replayed(self, captured: Trace, times: int = 1) -> None:
        """Count the calls that a CUDA graph captured by hand holds, as it is replayed.

        PyTorch tells of no such replay, so that they are counted where this says so alone. A graph
        of ``torch.compile(mode="reduce-overhead")`` is counted by itself.

        Args:
            captured: The trace that was open in the capture.
            times: How many replays.

        Raises:
            ValueError: times is negative.
        """
        if times < 0:
            raise ValueError(f"Trace.replayed: times must be at least 0, received {times!r}")
        calls = Counter[Way]()
        for way, count in captured._sum(lambda event: event.calls).items():
            calls[way._replace(how=REPLAYED if way.how == RAN else way.how)] += count
        fused = captured._sum(lambda event: event.fused)
        event = Event(calls, fused, captured._sum(lambda event: event.uncounted))
        with lock:
            self._counts[event] = times

    def to_json(self) -> str:
        """Give all records as a JSON object of three lists: records, fused, uncounted."""
        records = [asdict(record) | {"backend": record.backend.value} for record in self.records]
        rest = {name: list(map(asdict, getattr(self, name))) for name in ("fused", "uncounted")}
        return json.dumps({"records": records, **rest}, indent=2)

    def _sum(self, part: Callable[[Event], Counter[Any]]) -> Counter[Any]:
        with lock:
            counts = list(self._counts.items())
        total = Counter[Any]()
        for event, times in counts:
            for key, count in part(event).items():
                total[key] += count * times
        return total

    def __str__(self) -> str:
        rows = [("op", "backend", "source", "calls", "how", "skipped")]
        for record in self.records:
            skipped = "; ".join(f"{name}: {reason}" for name, reason in record.skipped)
            names = record.op, record.backend.value, record.source
            rows.append((*names, str(record.count), record.how, skipped))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [
            "  ".join([*(row[i].ljust(widths[i]) for i in range(5)), row[5]]).rstrip()
            for row in rows
        ]
        lines += [
            f"fused: {' + '.join(pair.calls)} into {pair.name}, {pair.count} times"
            for pair in self.fused
        ]
        lines += [
            f"not counted: {'calls' if lost.count is None else f'{lost.count} calls'} of "
            f"{lost.op or 'any op'}: {lost.reason}"
            for lost in self.uncounted
        ]
        return "\n".join(lines)


class _OfThread(threading.local):
    """What this thread's kernels have told in the compiled graph that it runs; None outside."""

    calls: dict[Event, int] | None = None


of_thread = _OfThread()


def active() -> bool:
    """Whether any trace is open."""
    return bool(open_counts)


def note(event: Event, times: int = 1) -> None:
    """Count what has happened in every open trace."""
    with lock:
        for counts in open_counts:
            counts[event] = counts.get(event, 0) + times


def way_of(
    op: str,
    backend: OpenEnum,
    source: str,
    skipped: Sequence[tuple[OpenEnum, str]],
    how: str = RAN,
) -> Way:
    """Name how a call goes."""
    return Way(op, backend, source, tuple((name.value, reason) for name, reason in skipped), how)


def event_of(way: Way) -> Event:
    """Give the event of a call that goes a way: one object for equal ones."""
    event = _events.get(way)
    if event is None:
        with lock:
            if len(_events) >= _KEPT:
                _events.clear()
            event = _events.setdefault(way, Event(Counter((way,))))
    return event


def counted(function: Callable[..., Any], way: Way) -> Callable[..., Any]:
    """Make a function that is counted when it has returned, and is a range in PyTorch's profiler.

    The range is named ``torch_ops::<op> [<backend>]``.
    """
    event, label, local = event_of(way), f"torch_ops::{way.op} [{way.backend.value}]", of_thread

    def noted(*args: Any) -> Any:
        if _profiling():
            with record_function(label):
                result = function(*args)
        else:
            result = function(*args)
        calls = local.calls
        if calls is not None:
            calls[event] = calls.get(event, 0) + 1
            return result
        with lock:  # as in `note`, a call of which would cost as much again
            for counts in open_counts:
                counts[event] = counts.get(event, 0) + 1
        return result

    return noted


@contextmanager
def trace() -> Iterator[Trace]:
    """Record the calls of all threads in a ``with`` block, eager and compiled.

    Compiled graphs may be older than the trace. Of these, calls are counted too that have
    dissolved (`torch_ops.set_inline`) and calls that PyTorch's CUDA graphs replay, which run no
    Python. A CUDA graph that is captured by hand is counted once, when it is captured: see
    `Trace.replayed`. What can't be told is in `Trace.uncounted`. While a profiler of PyTorch's
    runs, each call is a range in it that names op and backend.

    Returns:
        A context manager that gives the `Trace`.
    """
    from torch_ops import counting, policy

    policy.refuse_in_traced_code("trace")
    opened = Trace()
    with lock:
        open_counts.append(opened._counts)
    policy.invalidate()  # first: a run of a graph is compared with what its kernels tell
    counting.follow()
    try:
        yield opened
    finally:
        with lock:
            open_counts[:] = [other for other in open_counts if other is not opened._counts]
            if not open_counts:
                _events.clear()
        counting.follow()
        policy.invalidate()
