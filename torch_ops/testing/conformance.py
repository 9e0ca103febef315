"""Which ops a backend has to prove."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from torch_ops.backend import Backend
from torch_ops.declarations import catalogue
from torch_ops.registry import registry
from torch_ops.testing.profiles import PROFILES


@dataclass(frozen=True)
class Case:
    """One op of one backend."""

    op: str
    backend: str


def refuse_unknown(profile: str, device: str) -> None:
    """Refuses options that every test would fail for.

    Raises:
        pytest.UsageError: There is no such profile, or no such device here.
    """
    if profile not in PROFILES:
        msg = f"--torch-ops-profile: received {profile!r}, accepted {', '.join(PROFILES)}"
        raise pytest.UsageError(msg)
    try:
        place = torch.device(device)
    except RuntimeError as error:
        msg = f"--torch-ops-device: received {device!r}, accepted a device, as cpu or cuda:1"
        raise pytest.UsageError(msg) from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        msg = f"--torch-ops-device: received {device!r}, accepted a device of this machine"
        raise pytest.UsageError(msg)


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
