"""Benchmarks aren't installed: their folder is put on the path. They run on the CPU here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure on the CPU, whatever there is."""
    from benchmarks import _measure

    monkeypatch.setattr(_measure, "device_here", lambda: torch.device("cpu"))
