"""One example, all layers: contract, bound, laws."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from torch_ops.contracts import PROMISES
from torch_ops.declarations import catalogue
from torch_ops.testing.arguments import build, contiguous
from torch_ops.testing.canaries import Guards, probe
from torch_ops.testing.classes import ClassLimit
from torch_ops.testing.compare import DeviceLostError, ViolationError, check_outputs, check_pairs
from torch_ops.testing.contract import Snapshot, check_fresh, check_metadata
from torch_ops.testing.laws import GENERIC
from torch_ops.testing.proof import Arguments, Law, Output, Proof, Trial
from torch_ops.testing.registered import check_compiled, check_traced, opcheck, registered
from torch_ops.testing.spec import Spec
from torch_ops.testing.subject import Subject, call, first_line
from torch_ops.testing.surroundings import left_alone

CPU = torch.device("cpu")
REMEMBERED = 100
T = TypeVar("T")


@dataclass
class Tally:
    """What the examples of one cell came to.

    Attributes:
        executed: Examples that ran.
        refused: Examples that the kernel refused beforehand, by reason.
        left_out: Examples of classes of calls past the limit.
        ratio: Largest error seen, as a part of its bound.
        laws: How often each law had something to say, and held.
        laws_refused: Laws about calls that the kernel refuses, with the first reason.
        refused_specs: Some of the refused examples, with the reasons.
        left_out_specs: Some of those left out.
    """

    executed: int = 0
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    left_out: int = 0
    ratio: float = 0.0
    laws: collections.Counter[str] = field(default_factory=collections.Counter)
    laws_refused: dict[str, str] = field(default_factory=dict)
    refused_specs: dict[Spec, str] = field(default_factory=dict)
    left_out_specs: list[Spec] = field(default_factory=list)

    def refuse(self, spec: Spec, reason: str) -> None:
        """Counts an example that the kernel refused."""
        self.refused[reason] += 1
        if len(self.refused_specs) < REMEMBERED:
            self.refused_specs[spec] = reason

    def leave_out(self, spec: Spec) -> None:
        """Counts an example of a class past the limit."""
        self.left_out += 1
        if len(self.left_out_specs) < REMEMBERED:
            self.left_out_specs.append(spec)

    def to_dict(self) -> dict[str, Any]:
        """Returns all but the examples themselves as plain data, for JSON."""
        return {
            "executed": self.executed,
            "refused": dict(self.refused),
            "left_out": self.left_out,
            "ratio": self.ratio,
            "laws": dict(self.laws),
            "laws_refused": self.laws_refused,
        }

    def add(self, other: Mapping[str, Any], spec: Spec) -> None:
        """Adds what one example came to in another process, as `to_dict` gave it there."""
        self.executed += other["executed"]
        for reason in other["refused"]:
            self.refuse(spec, reason)
        for _ in range(other["left_out"]):
            self.leave_out(spec)
        self.ratio = max(self.ratio, other["ratio"])
        self.laws.update(other["laws"])
        for law, reason in other["laws_refused"].items():
            self.laws_refused.setdefault(law, reason)


class _RefusedError(Exception):
    """The kernel can't serve a call that a law makes, or the limit leaves it out (no reason)."""

    def __init__(self, reason: str | None) -> None:
        super().__init__(reason)
        self.reason = reason


@contextlib.contextmanager
def _about(spec: Spec) -> Iterator[None]:
    """Says in errors which example they are about."""
    try:
        yield
    except ViolationError as broken:
        raise ViolationError(broken.layer, broken.detail, spec.to_json()) from broken.__cause__
    except DeviceLostError as lost:
        raise DeviceLostError(lost.detail, spec.to_json()) from lost.__cause__


@dataclass(frozen=True)
class Examiner:
    """Runs examples of one op on one kernel.

    Attributes:
        subject: The kernel under test.
        proof: The op's proof.
        contract: What the op's declaration promises.
        device: Where it runs.
        only: Layers to check; all where None. Mutants are judged by one layer alone.
        limit: Which classes of calls are run; all where None.
    """

    subject: Subject
    proof: Proof
    contract: Any
    device: torch.device = CPU
    only: Collection[str] | None = None
    limit: ClassLimit | None = None

    def admits(self, args: Arguments) -> bool:
        """Whether the limit lets a call through."""
        return self.limit is None or self.limit.admits(args)

    def _wants(self, layer: str) -> bool:
        return self.only is None or layer in self.only

    def __call__(self, spec: Spec, tally: Tally, *, with_laws: bool = True) -> float | None:
        """Runs one example.

        Returns:
            The largest error as a part of its bound, None where the kernel refused or the limit
            left the example out.

        Raises:
            ViolationError: The kernel broke a promise; it names the layer and carries the Spec.
        """
        with _about(spec):
            return self._serving(lambda: self._run(spec, tally, with_laws))

    def operator(self, spec: Spec, check: str) -> bool:
        """Checks the operator on one example; False where the kernel or the limit leaves it out.

        Args:
            spec: The example.
            check: ``opcheck`` (schema, fake kernel), ``traced`` or ``compiled``.

        Raises:
            ViolationError: A compiler is told or given something else than eager calls are.
        """
        args = build(spec, self.device)
        op, name = self.proof.op, self.subject.name
        steps: dict[str, Callable[[], None]] = {
            "opcheck": lambda: opcheck(op, name, args, spec.to_json()),
            "traced": lambda: check_traced(op, name, self.device, spec),
            "compiled": lambda: check_compiled(
                self.subject, self.proof, self.contract, self.device, spec
            ),
        }
        with _about(spec):
            if self._refuses(args) is not None or not self.admits(args):
                return False
            try:
                self._serving(steps[check])
            except ViolationError:
                raise
            except (Exception, SystemExit) as error:  # the kernel's, met by a checker or a compiler
                raise ViolationError(check, first_line(error)) from error
        return True

    def _serving(self, step: Callable[[], T]) -> T:
        """Takes a step, after which the device still has to serve, also where it raised."""
        try:
            result = step()
        except ViolationError as broken:
            probe(self.device, broken.detail)
            raise
        except torch.AcceleratorError as error:
            raise DeviceLostError(first_line(error)) from error
        probe(self.device)
        return result

    def _run(self, spec: Spec, tally: Tally, with_laws: bool) -> float | None:
        args = build(spec, self.device)
        if not self.admits(args):
            tally.leave_out(spec)
            return None
        with self._watched():
            reason = self._refuses(args)
        if reason is not None:
            tally.refuse(spec, reason)
            return None
        pristine = contiguous(args)
        expected = self.proof.oracle(contiguous(build(spec)), self.contract)
        outputs = self._checked_call(args, expected)
        ratio = 0.0
        if self._wants("bound"):
            ratio = check_outputs(outputs, expected)
        if with_laws:
            calls = self._again, self._refuses, self._other
            given = tuple(o.contiguous() for o in outputs)
            trial = Trial(spec, pristine, given, self.contract, expected, *calls, given=given)
            self._check_laws(self._laid_out_alike(trial), tally)
        tally.executed += 1
        tally.ratio = max(tally.ratio, ratio)
        return ratio

    def _laid_out_alike(self, trial: Trial) -> Trial:
        """Lets laws compare calls of contiguous arguments alone, where layouts may move bits."""
        if self.contract.batch_invariant or trial.spec.contiguous:
            return trial
        try:
            return replace(trial, outputs=trial.run())
        except _RefusedError:
            return trial  # as whatever laws run

    def _checked_call(self, args: Arguments, expected: tuple[Output, ...]) -> tuple[Tensor, ...]:
        before = Snapshot.take(args)
        sizes = [e.value.numel() * e.dtype.itemsize for e in expected]
        guards = Guards.place(sizes, self.device)
        outputs = self._call(args)
        if not self._wants("contract"):
            return outputs
        check_metadata(outputs, expected, args)
        if not self.proof.mutates:
            check_fresh(outputs, args, ())
            again = self._call(args)
            check_fresh(again, args, outputs)
        before.check(args, self.proof.mutates)
        guards.check()
        return outputs

    def _again(self, args: Arguments) -> tuple[Tensor, ...]:
        """A further call for a law, on fresh copies where the op writes its arguments."""
        if self.proof.mutates:
            args = contiguous(args)
        reason = self._refuses(args)
        if reason is not None or not self.admits(args):
            raise _RefusedError(reason)
        return self._call(args)

    def _call(self, args: Arguments) -> tuple[Tensor, ...]:
        with self._watched():
            return call(self.subject, self.proof, args)

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        return left_alone(self.device) if self._wants("contract") else contextlib.nullcontext()

    def _other(self, op: str, *args: Any) -> Any:
        """Another op by the same backend; the reference for what is no backend."""
        if not self.subject.registered:
            return catalogue()[op].reference(*args)
        subject = registered(op, self.subject.name)
        reason = subject.refuses(args)
        if reason is not None:
            raise _RefusedError(reason)
        return subject.call(*args)

    def _refuses(self, args: Arguments) -> str | None:
        return self.subject.refuses(tuple(args.values()))

    def why_silent(self, law: Law, tally: Tally) -> str | None:
        """Why the kernel refused the first example about which a law has something to say."""
        refused = tally.refused_specs.items()
        return next((reason for spec, reason in refused if self.speaks(law, spec)), None)

    def speaks(self, law: Law, spec: Spec) -> bool:
        """Whether a law has something to say about an example; the kernel isn't called."""
        args = contiguous(build(spec))
        expected = self.proof.oracle(args, self.contract)
        outputs = tuple(o.value.to(o.dtype) for o in expected)

        def called(_: Arguments) -> tuple[Tensor, ...]:
            raise _RefusedError(None)

        try:
            trial = Trial(spec, args, outputs, self.contract, expected, called)
            return law.pairs(trial) is not None
        except _RefusedError:
            return True

    def _check_laws(self, trial: Trial, tally: Tally) -> None:
        for law in self.laws():
            if not self._wants(law.name):
                continue
            try:
                tally.laws[law.name] += self._holds(law, trial)
            except _RefusedError as refused:
                if refused.reason is not None:
                    tally.laws_refused.setdefault(law.name, refused.reason)

    def laws(self) -> list[Law]:
        """The laws that bind kernels under the contract."""
        return [law for law in (*GENERIC, *self.proof.laws) if law.binds(self.contract)]

    def unproven(self) -> list[str]:
        """What the contract promises, and no law is about."""
        about = {law.declared for law in self.laws()}
        return [name for name in PROMISES if getattr(self.contract, name) and name not in about]

    @staticmethod
    def _holds(law: Law, trial: Trial) -> bool:
        pairs = law.pairs(trial)
        if pairs is None:
            return False
        check_pairs(law.name, pairs)
        return True
