"""Examples in a process of their own, so that a crash or a hang is a failing example like others.

The process gets a Spec as JSON and answers with what the example came to. A kernel that kills it,
loses its GPU or doesn't answer has broken the contract: hypothesis goes on and finds the smallest
example that does. Boundary: nothing here runs a kernel or touches a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from torch_ops.backend import Backend
from torch_ops.registry import registry
from torch_ops.testing.compare import ViolationError
from torch_ops.testing.examine import Examiner, Tally
from torch_ops.testing.process import DeathError, Process
from torch_ops.testing.proof import Law
from torch_ops.testing.spec import Spec
from torch_ops.testing.worker import Assignment, Message, found


class OutOfPatienceError(BaseException):
    """Enough processes died. No `Exception`, so that hypothesis ends instead of shrinking.

    Attributes:
        last: The last example that killed one; as shrinking goes down, the smallest.
        why: What was too much.
    """

    def __init__(self, last: ViolationError, why: str) -> None:
        super().__init__(f"{last} ({why})")
        self.last, self.why = last, why


def assignment(
    op: str, backend: str | Backend | Callable[..., Any], device: torch.device | str = "cpu"
) -> Assignment:
    """Says what a process has to examine.

    Args:
        op: The op.
        backend: A registered backend, or a function that another process can import.
        device: Where to run.

    Raises:
        ValueError: No other process can import the function.
    """
    place, threads = str(device), torch.get_num_threads()
    if isinstance(backend, str | Backend):
        spec = registry.find(op, backend)
        return Assignment(op, spec.backend.value, spec.target, place, threads)
    module = getattr(backend, "__module__", "__main__")
    target = f"{module}:{getattr(backend, '__qualname__', type(backend).__qualname__)}"
    same = False
    if module != "__main__":
        with contextlib.suppress(LookupError):
            same = found(target) is backend
    if not same:
        msg = (
            f"verify: backend: received {backend!r}, which another process can't import "
            "(accepted with isolate: a registered backend, or a function of an importable module; "
            "isolate=False takes any callable)"
        )
        raise ValueError(msg)
    return Assignment(op, "", target, place, threads)


class Isolated:
    """An `Examiner` whose examples run in a `Process`."""

    def __init__(self, inner: Examiner, process: Process) -> None:
        self.inner, self.process = inner, process
        self.laws: Callable[[], list[Law]] = inner.laws
        self.unproven, self.why_silent = inner.unproven, inner.why_silent
        self.speaks, self.device, self.limit = inner.speaks, inner.device, inner.limit
        self.deaths, self.hanging = 0, 0.0
        self._last: ViolationError | None = None
        self._hung: dict[str, ViolationError] = {}

    def __call__(self, spec: Spec, tally: Tally, *, with_laws: bool = True) -> float | None:
        """Runs one example, as `Examiner` does.

        Raises:
            ViolationError: The kernel broke a promise, killed its process, or didn't answer.
            OutOfPatienceError: Too many processes died already, or hung for too long.
        """
        reply = self._ask({"do": "example", "laws": with_laws}, spec, tally)
        ratio: float | None = reply["ratio"]
        return ratio

    def operator(self, spec: Spec, check: str) -> bool:
        """Checks the operator on one example, as `Examiner.operator` does."""
        return bool(self._ask({"do": check}, spec, Tally())["ran"])

    def _ask(self, request: Message, spec: Spec, tally: Tally) -> Message:
        text, limit = spec.to_json(), self.inner.limit
        if text in self._hung:
            raise self._hung[text]  # a hang isn't waited for twice
        self._refuse_more()
        classes = {
            "most": None if limit is None else limit.most,
            "admitted": [] if limit is None else sorted(limit.seen),
        }
        try:
            reply = self.process.ask({**request, **classes, "spec": text})
        except DeathError as death:
            self.hanging += death.waited
            raise self._died(death.detail, text, hung=death.waited > 0) from None
        tally.add(reply["tally"], spec)
        if limit is not None:
            limit.seen.update(reply["admitted"])
        if "lost" in reply:
            raise self._died(f"the GPU's context was lost: {reply['lost']}", text, hung=False)
        if "violation" in reply:
            layer, detail = reply["violation"]
            raise ViolationError(layer, detail, text)
        return reply

    def _refuse_more(self) -> None:
        patience = self.process.patience
        if self._last is not None and self.deaths >= patience.deaths:
            raise OutOfPatienceError(self._last, "too many processes died")
        if self._last is not None and self.hanging >= patience.hanging:
            why = f"examples that hang took {self.hanging:g} s"
            raise OutOfPatienceError(self._last, why)

    def _died(self, detail: str, text: str, *, hung: bool) -> ViolationError:
        self.deaths += 1
        self._last = ViolationError("contract", detail, text)
        if hung:
            self._hung[text] = self._last
        return self._last
