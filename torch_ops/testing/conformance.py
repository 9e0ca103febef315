"""Which ops a backend has to prove."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from torch_ops.backend import Backend
from torch_ops.declarations import catalogue
from torch_ops.registry import registry


@dataclass(frozen=True)
class Case:
    """One op of one backend."""

    op: str
    backend: str


def cases(backends: Sequence[str]) -> list[Case]:
    """Returns every declared op that each backend serves.

    Raises:
        pytest.UsageError: No backend was named, one is unknown, or one serves no op: nothing
            would be proven, which is not a success.
    """
    if not backends:
        msg = "name the backend to prove: --torch-ops-backend NAME"
        raise pytest.UsageError(msg)
    found = []
    for name in backends:
        if name not in {b.value for b in Backend}:
            known = ", ".join(sorted(b.value for b in Backend))
            msg = f"--torch-ops-backend: received {name!r}, accepted {known}"
            raise pytest.UsageError(msg)
        served = [
            Case(op, name)
            for op in catalogue()
            if any(spec.backend.value == name for spec in registry.get(op))
        ]
        if not served:
            msg = f"--torch-ops-backend: {name!r} serves no declared op: there is nothing to prove"
            raise pytest.UsageError(msg)
        found += served
    return found
