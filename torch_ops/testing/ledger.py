"""The ledger of known faults: the only thing that excuses an example, always by a public issue.

What a kernel can't do belongs into its `supports`. The ledger holds what it does wrongly in calls
that it should serve, until its authors mend it.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch_ops.declarations import catalogue
from torch_ops.errors import UnknownBackendError
from torch_ops.registry import registry
from torch_ops.testing.compare import ViolationError
from torch_ops.testing.spec import Spec

TOLERATED, NEVER_LAUNCHED = "tolerated", "never launched"
_ISSUE = re.compile(r"[\w./-]*\w#\d+")


@dataclass(frozen=True)
class Entry:
    """A known fault of one kernel.

    Attributes:
        op: The op.
        backend: Whose kernel.
        matches: Which examples show the fault. The calls that laws make from an example aren't
            Specs: a fault that they would meet has to match the example that they are made from.
        issue: Where it is reported, such as ``"flashinfer#1234"``.
        kind: ``tolerated``: the example runs and may fail; where no example of a cell fails any
            more, the entry is stale, which is red. ``never launched``: it would crash or corrupt.
    """

    op: str
    backend: str
    matches: Callable[[Spec], bool]
    issue: str
    kind: str

    def __post_init__(self) -> None:
        if not _ISSUE.fullmatch(self.issue):
            msg = f"ledger: issue: received {self.issue!r}, accepted 'project#number'"
            raise ValueError(msg)
        if self.kind not in {TOLERATED, NEVER_LAUNCHED}:
            msg = (
                f"ledger: kind: received {self.kind!r}, accepted {TOLERATED!r}, {NEVER_LAUNCHED!r}"
            )
            raise ValueError(msg)


LEDGER: tuple[Entry, ...] = ()
"""Empty: what is known of the kernels that this package wraps, their adapters refuse."""


def entries_of(op: str, backend: str) -> tuple[Entry, ...]:
    """Returns the entries about one kernel, after checking that all are about kernels there are.

    Raises:
        LookupError: An entry names an op that isn't declared, or a backend that it doesn't have.
    """
    for entry in LEDGER:
        if entry.op not in catalogue():
            msg = f"ledger: {entry.issue}: op {entry.op!r} is not declared"
            raise LookupError(msg)
        try:
            registry.find(entry.op, entry.backend)
        except UnknownBackendError as error:
            msg = f"ledger: {entry.issue}: op {entry.op!r} has no backend {entry.backend!r}"
            raise LookupError(msg) from error
    return tuple(e for e in LEDGER if (e.op, e.backend) == (op, backend))


@dataclass
class Known:
    """The entries about one kernel, and what they came to in one cell.

    Attributes:
        entries: In the order in which they are asked; the first that matches decides.
        excused: Examples that failed as known, or weren't run, by kind and issue.
        passed: Of entries whose examples ran and were right: one of them.
    """

    entries: Sequence[Entry] = ()
    excused: dict[tuple[str, str], set[Spec]] = field(
        default_factory=lambda: collections.defaultdict(set)
    )
    passed: dict[str, Spec] = field(default_factory=dict)

    def run(self, spec: Spec, example: Callable[[], float | None]) -> float | None:
        """Runs an example unless it would do harm, and forgives a fault that is known.

        Returns:
            What the example returns; None where it isn't launched, 0 where it fails as known.

        Raises:
            ViolationError: No entry matches, and the kernel broke a promise.
        """
        entry = next((e for e in self.entries if e.matches(spec)), None)
        if entry is None:
            return example()
        if entry.kind == NEVER_LAUNCHED:
            self.excused[entry.kind, entry.issue].add(spec)
            return None
        try:
            ratio = example()
        except ViolationError:
            self.excused[entry.kind, entry.issue].add(spec)
            return 0.0
        if ratio is not None:
            self.passed.setdefault(entry.issue, spec)
        return ratio

    def stale(self) -> dict[str, Spec]:
        """Issues whose examples ran and were all right, with one of them."""
        return {i: spec for i, spec in self.passed.items() if (TOLERATED, i) not in self.excused}

    def counts(self, kind: str) -> dict[str, int]:
        """How many different examples were excused in one way, by issue."""
        return {issue: len(specs) for (k, issue), specs in self.excused.items() if k == kind}
