"""Checks that run in processes of their own, each of which takes every n-th."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

__all__ = ["ROOT", "everything", "in_processes", "quicken", "work"]

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


def everything(module: ModuleType, **env: str) -> None:
    """Share all checks of a module between processes; fails by what broke."""
    found = in_processes(module.__name__.rpartition(".")[2], "--every", **env)
    assert sorted(found) == sorted(module.checks(every=True))
    assert [broken for broken in found.values() if broken] == []


def work(checks: Sequence[str], run: Callable[[str], object]) -> None:
    """Run the checks of which this process takes every n-th."""
    quicken()
    first, step = map(int, sys.argv[1:3])
    results: dict[str, str | None] = {}
    for check in checks[first::step]:
        try:
            run(check)
            results[check] = None
        except Exception:  # reported by the test of this name
            results[check] = traceback.format_exc()
    sys.stdout.write(json.dumps(results))


def quicken() -> None:
    """Save what takes half of a process's time: threads, and looking for what is interpreted.

    Triton's interpreter goes through all of its language at each call of a device function.
    """
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    is_builtin = interpreter.tl.core.is_builtin

    @functools.cache
    def names(owner: object) -> list[str]:
        return [name for name, member in inspect.getmembers(owner) if is_builtin(member)]

    def patch(owner: object, builder: object, scope: object) -> None:
        for name in names(owner):
            member = getattr(owner, name)
            if is_builtin(member):
                interpreter._patch_attr(owner, name, member, builder, scope)

    interpreter._patch_builtin = patch
