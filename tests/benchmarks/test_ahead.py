"""Compiling ahead: what fails or hangs in a worker is noted, and nobody waits for it."""

from __future__ import annotations

import os
import time

import pytest


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_COMPILE_THREADS", "MAX_JOBS"):  # what is tested sets them, too
        monkeypatch.setenv(name, "1")


def test_what_a_task_raises_is_noted_and_the_next_runs() -> None:
    from benchmarks._ahead import compile_ahead

    found = compile_ahead(time.sleep, [-1.0, 0.0, -2.0], workers=1, seconds=60)
    assert found == [f"{n}: ValueError: sleep length must be non-negative" for n in (-1.0, -2.0)]


def test_a_worker_that_dies_is_noted() -> None:
    from benchmarks._ahead import compile_ahead

    (found,) = compile_ahead(os._exit, [3], workers=1, seconds=60)
    assert found.endswith(": exit code 3")


def test_a_worker_that_hangs_is_killed() -> None:
    from benchmarks._ahead import compile_ahead

    started = time.monotonic()
    (found,) = compile_ahead(time.sleep, [600.0], workers=4, seconds=0)
    assert found.endswith(": not done in 0 s")
    assert time.monotonic() - started < 60
