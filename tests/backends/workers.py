"""Checks that run in processes of their own, each of which takes every n-th."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["ROOT", "in_processes", "work"]

ROOT = Path(__file__).parents[2]
JOBS = min(os.cpu_count() or 1, 4)


def in_processes(module: str, *flags: str, **env: str) -> dict[str, str | None]:
    """Share a module's checks between processes and give what broke, by check."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.backends.{module}", str(job), str(JOBS), *flags],
            cwd=ROOT,
            env=os.environ | env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for job in range(JOBS)
    ]
    results: dict[str, str | None] = {}
    for process in running:
        out, _ = process.communicate()
        assert process.returncode == 0, f"exit {process.returncode}: {out[-2000:]}"
        results |= json.loads(out)
    return results


def work(checks: Sequence[str], run: Callable[[str], object]) -> None:
    """Run the checks of which this process takes every n-th."""
    first, step = map(int, sys.argv[1:3])
    results: dict[str, str | None] = {}
    for check in checks[first::step]:
        try:
            run(check)
            results[check] = None
        except Exception:  # reported by the test of this name
            results[check] = traceback.format_exc()
    sys.stdout.write(json.dumps(results))
