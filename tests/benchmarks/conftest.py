"""Benchmarks aren't installed: their folder is put on the path. They run on the CPU here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``import benchmarks`` work inside of tests, with no GPU."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    from benchmarks import _measure

    monkeypatch.setattr(_measure, "device_here", lambda: torch.device("cpu"))
