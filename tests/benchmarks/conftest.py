"""Benchmarks aren't installed: their folder is put on the path."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``import benchmarks`` work inside of tests."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
