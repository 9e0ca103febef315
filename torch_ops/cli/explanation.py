"""``explain``: the decision for one call, without running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch_ops
from torch_ops.cli.arguments import Sample, UsageError
from torch_ops.cli.output import Report, Table
from torch_ops.declarations import catalogue
from torch_ops.declare import Declaration
from torch_ops.selector import describe

__all__ = ["graph", "report"]


def report(op: str, sample: Sample, backend: str | None) -> Report:
    """Explain a call with sample arguments; without shapes, what the device alone decides.

    Raises:
        UsageError: the arguments aren't legal for the op.
        TorchOpsError: the op or the backend is unknown, or the environment can't be read.
    """
    declaration = catalogue().get(op)
    given: dict[str, Any] = {}
    if declaration is not None and (sample.shapes or sample.values):
        given = _arguments(declaration, sample)
    found = torch_ops.explain(
        op,
        platform=torch_ops.Platform.detect(sample.device),
        **given,
        **({} if backend is None else {"backend": backend}),
    )
    if isinstance(found.error, torch_ops.UnknownBackendError):
        raise found.error
    data: dict[str, Any] = {
        "op": found.op,
        "chosen": found.chosen.value if found.chosen else None,
        "source": found.source,
        "platform": str(found.platform),
        "arguments": {name: describe(value) for name, value in given.items()},
        "candidates": [_candidate(candidate) for candidate in found.candidates],
    }
    if found.inlining is not None:
        data["compiled"] = found.inlining._asdict()
    if found.error is not None:
        data["error"] = {"type": type(found.error).__name__, "message": str(found.error)}
    return Report(data, (str(found),), ok=found.chosen is not None)


def graph(function: Callable[[], object]) -> Report:
    """Compile and run a function, and say of every pair in its graphs that a pass knows why.

    Nothing is compiled beyond the graphs, and they run as eager code.
    """
    import torch._dynamo

    torch._dynamo.reset()
    with torch_ops.fusion.record() as pairs:
        torch.compile(function, backend="eager")()
    data = {"pairs": [asdict(pair) for pair in pairs], "passes": list(torch_ops.fusion.PASSES)}
    rows = [
        (pair.name, " + ".join(pair.calls), "yes" if pair.fused else "no", pair.place, pair.reason)
        for pair in pairs
    ]
    title = f"{len(rows)} pairs of calls that one op computes"
    return Report(data, (Table(title, ("pass", "calls", "fused", "place", "reason"), rows),))


def _arguments(declaration: Declaration, sample: Sample) -> dict[str, Any]:
    given = sample.build(declaration.name, declaration.signature)
    bound = declaration.signature.bind(**given)
    bound.apply_defaults()
    try:
        declaration.check_call(*bound.args)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    return given


def _candidate(candidate: torch_ops.Candidate) -> dict[str, Any]:
    return {
        "backend": candidate.backend.value,
        "usable": candidate.usable,
        "reasons": list(candidate.reasons),
        "state": candidate.state,
    }
