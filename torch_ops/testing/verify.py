"""The runner: every layer over every dtype of an op, for a backend or for any callable."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_ops.backend import Backend
from torch_ops.declarations import catalogue
from torch_ops.testing._hypothesis import FlakyFailure, Phase, Unsatisfiable, reject, target
from torch_ops.testing.classes import ClassLimit
from torch_ops.testing.compare import DeviceLostError, ViolationError
from torch_ops.testing.examine import Examiner, Tally
from torch_ops.testing.isolation import Isolated, OutOfPatienceError, assignment
from torch_ops.testing.ledger import NEVER_LAUNCHED, TOLERATED, Known, entries_of
from torch_ops.testing.process import Patience, Process
from torch_ops.testing.profiles import Profile, profile_of
from torch_ops.testing.proof import Law, Proof, proof_of
from torch_ops.testing.registered import subject_for
from torch_ops.testing.reproduction import OPERATOR_CHECKS, command, device_name, versions
from torch_ops.testing.result import (
    FAILED,
    PASSED,
    TOO_FEW,
    UNSUPPORTED,
    UNTESTABLE,
    Cell,
    Failure,
    Result,
)
from torch_ops.testing.search import covering_rows, dtypes_of, generate
from torch_ops.testing.spec import Spec
from torch_ops.testing.subject import Subject

OPCHECK_EVERY = 10
# Of the covering rows: traced in 0.02 to 0.13 s each, compiled in 0.07 to 0.3 s (measured, CPU).
TRACED_EVERY = {"dev": 9, "torch_ops_ci": 3}
COMPILED_EVERY = {"dev": 27, "torch_ops_ci": 9}
COSTLY = 4
CLASSES_OF_A_LAW = 4  # of the call that a law is about, and of those that it makes
MINIMUM_SHARE = 4


@dataclass(frozen=True)
class Progress:
    """How far a verification is: `done` of `total` examples of a phase."""

    op: str
    dtype: str
    phase: str
    done: int
    total: int


Report = Callable[[Progress], None]


def verify(
    op: str,
    backend: str | Backend | Callable[..., Any],
    *,
    device: torch.device | str = "cpu",
    profile: str = "torch_ops_ci",
    progress: Report | None = None,
    dtypes: Sequence[str] | None = None,
    max_classes: int | None = None,
    isolate: bool | None = None,
    patience: Patience | None = None,
) -> Result:
    """Proves a kernel against the op's declaration, dtype by dtype.

    Isolated, the kernel runs in a process of its own: one that crashes, hangs or loses the GPU is
    wrong at an example that is shrunk like any other.

    Args:
        op: Name of a declared op.
        backend: A registered backend, or any callable with the op's signature.
        device: Where to run.
        profile: ``dev``, ``torch_ops_ci``, ``nightly`` or ``soak``.
        progress: Called after every example.
        dtypes: Names of dtypes to verify; all that the op declares where None.
        max_classes: Run at most so many classes of calls a dtype, for backends that compile each
            (see `classes.class_of`); examples of others are left out and counted, but for one of
            each law that would have none.
        isolate: Whether to isolate; None isolates on a GPU. Only registered backends of installed
            packages and functions of importable modules can be.
        patience: How long an isolated kernel is waited for, and how many processes may die.

    Returns:
        The verdict; ``result.ok`` is True if every cell that can be proven here is.

    Raises:
        UnknownOpError: The op isn't declared.
        LookupError: The op has no proof.
        UnknownBackendError: The op has no such backend.
        TypeError: `backend` or `dtypes` is something else.
        ValueError: No such profile, dtype or device, or another process can't find the kernel.
    """
    chosen, proof = profile_of(profile), proof_of(op)
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"verify: device: received {device!r}, accepted: 'cpu' (there is no GPU)")
    wanted = _dtypes(op, dtypes)
    started = time.monotonic()
    isolated = place.type == "cuda" if isolate is None else isolate
    process = Process(assignment(op, backend, place), patience or Patience()) if isolated else None
    with contextlib.closing(process) if process else contextlib.nullcontext():
        subject = subject_for(op, backend, place)
        contract = subject.under(catalogue()[op].contract)

        def run(dtype: str) -> _Run:
            limit = None if max_classes is None else ClassLimit(max_classes)
            examiner = Examiner(subject, proof, contract, place, limit=limit)
            examine = Isolated(examiner, process) if process else examiner
            return _Run(subject, proof, dtype, examine, chosen, progress)

        name = "" if process else device_name(place)
        cells = _cells([run(dtype) for dtype in wanted])
    seconds = time.monotonic() - started
    found = versions(
        process.device if process else name, subject.name if subject.registered else ""
    )
    return Result(op, subject.name, str(device), profile, seconds, found, cells)


def _cells(runs: Sequence[_Run]) -> tuple[Cell, ...]:
    cells: list[Cell] = []
    for run in runs:
        cells.append(run.cell())
        if run.lost:
            why = f"not run: the GPU's context was lost while {run.dtype} was being proven"
            cells += [Cell(rest.dtype, FAILED, why) for rest in runs[len(cells) :]]
            break
    return tuple(cells)


def _dtypes(op: str, wanted: Sequence[str] | None) -> list[str]:
    declared = list(dtypes_of(op))
    if isinstance(wanted, str) or not all(isinstance(dtype, str) for dtype in wanted or ()):
        msg = f"verify: dtypes: received {wanted!r}, accepted a sequence of names, as {[*declared]}"
        raise TypeError(msg)
    unknown = set(wanted or ()) - set(declared)
    if unknown:
        msg = f"verify: dtypes: received {sorted(unknown)}, accepted {[*declared]} for op {op!r}"
        raise ValueError(msg)
    return [d for d in declared if wanted is None or d in wanted]


class _Run:
    """The verification of one cell."""

    def __init__(
        self,
        subject: Subject,
        proof: Proof,
        dtype: str,
        examine: Examiner | Isolated,
        profile: Profile,
        progress: Report | None,
    ) -> None:
        self.subject, self.proof, self.dtype = subject, proof, dtype
        self.examine, self.profile, self.progress = examine, profile, progress
        self.known = Known(entries_of(proof.op, subject.name) if subject.registered else ())
        self.tally = Tally()
        self.examples = profile.examples(proof.cost)
        self.opchecks = self.traced = self.compiled = 0
        self.lost = False
        self.failures: list[Failure] = []

    def cell(self) -> Cell:
        """Runs every phase and returns the verdict."""
        untestable = self.subject.untestable(getattr(torch, self.dtype))
        if untestable is not None:
            return Cell(self.dtype, UNTESTABLE, untestable)
        try:
            return self._judge(self._phases())
        except DeviceLostError as lost:
            self.lost = True
            self._failed("lost", ViolationError("contract", lost.detail, lost.spec))
            return self._cell(FAILED, lost.detail, {})

    def _phases(self) -> int:
        """Runs every phase and returns how many examples count."""
        rows = [s for s in covering_rows(self.proof.op) if s.dtype == self.dtype]
        zero, classes = self.proof.zero(self.dtype), self.proof.classes(self.dtype)
        self._fixed("covering", rows, with_laws=True)
        self._fixed("named", self.proof.small_named(self.dtype), with_laws=True)
        counted = self.tally.executed
        self._fixed("zero", zero, with_laws=False)
        self._fixed("classes", classes, with_laws=False)
        if not self.tally.executed and not self.failures:
            return counted  # refused, one and all: what is drawn would be, too
        name = self.profile.name
        self.opchecks = self._operator("opcheck", [*rows[::OPCHECK_EVERY], *zero])
        thinner = max(self.proof.cost // COSTLY, 1)  # for ops of many arguments
        traced, compiled = (
            thinner * every[name] if name in every else 1
            for every in (TRACED_EVERY, COMPILED_EVERY)
        )
        self.traced = self._operator("traced", rows[::traced])
        self.compiled = self._operator("compiled", rows[::compiled])
        counted += self._generated()
        self._heed_laws()
        return counted

    def _judge(self, counted: int) -> Cell:
        least = max(self.examples // MINIMUM_SHARE, 1)
        binding = [law for law in self.examine.laws() if law.about(self.dtype)]
        laws = {law.name: self.tally.laws[law.name] for law in binding}
        silent = [law for law in binding if not self._heard(law)]
        refused = _grouped(self.tally.refused)
        for issue, spec in self.known.stale().items():
            why = f"every example of {issue} that ran was right: its entry is stale"
            self._failed("ledger", ViolationError("ledger", why, spec.to_json()))
        verdict, reason = PASSED, ""
        if self.failures:
            verdict, reason = FAILED, self.failures[0].detail
        elif not self.tally.executed and refused:
            verdict, reason = UNSUPPORTED, "; ".join(refused)
        elif counted < least:
            verdict, reason = TOO_FEW, f"{counted} examples ran, at least {least} are needed"
            reason += f"; refused: {refused}" if refused else ""
        elif self.examine.unproven():
            promised = ", ".join(self.examine.unproven())
            verdict, reason = TOO_FEW, f"promised, and no law is about it: {promised}"
        elif silent:
            verdict, reason = TOO_FEW, f"never checked: {', '.join(law.name for law in silent)}"
        return self._cell(verdict, reason, laws)

    def _heard(self, law: Law) -> bool:
        """Whether a law was checked, or needs calls that the kernel refuses."""
        if self.tally.laws[law.name] or law.name in self.tally.laws_refused:
            return True
        reason = self.examine.why_silent(law, self.tally)
        if reason is not None:
            self.tally.laws_refused[law.name] = reason
        return reason is not None

    def _cell(self, verdict: str, reason: str, laws: dict[str, int]) -> Cell:
        tally = self.tally
        return Cell(
            self.dtype, verdict, reason, tally.executed, _grouped(tally.refused), tally.left_out,
            tally.ratio, laws, tally.laws_refused, self.opchecks, tuple(self.failures),
            self.known.counts(TOLERATED), self.known.counts(NEVER_LAUNCHED), self.traced,
            self.compiled,
        )  # fmt: skip

    def _fixed(self, phase: str, specs: Sequence[Spec], *, with_laws: bool) -> None:
        for done, spec in enumerate(specs, start=1):
            try:
                self._example(spec, with_laws=with_laws)
            except ViolationError as broken:
                self._failed(phase, broken)
                return
            except OutOfPatienceError as end:
                self._ended(phase, end)
                return
            self._tell(phase, done, len(specs))

    def _heed_laws(self) -> None:
        """Has laws heard that had nothing to say within the limit: for each, a few more classes."""
        limit = self.examine.limit
        if limit is None or self.failures:
            return
        for law in self.examine.laws():
            for spec in self.tally.left_out_specs:
                if self.tally.laws[law.name] or not law.about(self.dtype):
                    break
                if self.examine.speaks(law, spec):
                    limit.most = len(limit.seen) + CLASSES_OF_A_LAW
                    self._fixed("laws", [spec], with_laws=True)
            limit.most = len(limit.seen)

    def _example(self, spec: Spec, *, with_laws: bool = True) -> float | None:
        return self.known.run(spec, lambda: self.examine(spec, self.tally, with_laws=with_laws))

    def _generated(self) -> int:
        before, done = self.tally.executed, 0
        climbs = Phase.target in self.profile.settings.phases

        def one(spec: Spec) -> None:
            nonlocal done
            ratio = self._example(spec)
            if ratio is None:
                reject()
            if climbs and ratio:
                target(math.log2(ratio))
            done = min(done + 1, self.examples)
            self._tell("generated", done, self.examples)

        try:
            generate(self.proof.op, self.dtype, self.profile, one, self.examples)
        except ViolationError as broken:
            self._failed("generated", broken)
        except OutOfPatienceError as end:
            self._ended("generated", end)
        except Unsatisfiable:
            pass  # all were refused, and counted
        except FlakyFailure as flaky:
            self._failed("generated", _first_violation(flaky))
        return self.tally.executed - before

    def _operator(self, check: str, specs: Sequence[Spec]) -> int:
        """Checks the operator of a registered backend; returns for how many examples it held."""
        held = 0
        for spec in specs if self.subject.registered else ():
            try:
                held += bool(self.known.run(spec, functools.partial(self._held, check, spec)))
            except ViolationError as broken:
                self._failed(check, broken)
                break
            except OutOfPatienceError as end:
                self._ended(check, end)
                break
        return held

    def _held(self, check: str, spec: Spec) -> float | None:
        return 1.0 if self.examine.operator(spec, check) else None

    def _ended(self, phase: str, end: OutOfPatienceError) -> None:
        last = end.last
        detail = f"{last.detail} (not shrunk further: {end.why})"
        self._failed(phase, ViolationError(last.layer, detail, last.spec))

    def _failed(self, phase: str, broken: ViolationError) -> None:
        check = phase if phase in OPERATOR_CHECKS else ""
        again = command(broken.spec, self.subject, self.examine.device, check)
        failure = Failure(phase, broken.layer, broken.detail, broken.spec, again)
        self.failures.append(failure)

    def _tell(self, phase: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(Progress(self.proof.op, self.dtype, phase, done, total))


def _grouped(refused: dict[str, int]) -> dict[str, int]:
    """Counts reasons that differ in numbers alone as one: the first of them."""
    first: dict[str, str] = {}
    found: dict[str, int] = {}
    for reason, count in refused.items():
        kept = first.setdefault(re.sub(r"\d+", "#", reason), reason)
        found[kept] = found.get(kept, 0) + count
    return found


def _first_violation(flaky: FlakyFailure) -> ViolationError:
    """A failure that did not come again when it was replayed."""
    for error in flaky.exceptions:
        if isinstance(error, ViolationError):
            detail = f"not reproducible, the same example failed once: {error.detail}"
            return ViolationError(error.layer, detail, error.spec)
    raise flaky
