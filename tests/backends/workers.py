"""Checks that run in processes of their own, each of which takes every n-th."""

from __future__ import annotations

import functools
import importlib
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
# As many as the cores that other processes of the tests leave: each imports all that it needs.
OTHERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
JOBS = max(1, min(os.cpu_count() or 1, 4) // OTHERS)


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
    """Save what takes half of a process's time: threads, and what the interpreter makes anew.

    Triton's interpreter goes through all of its language at each call of a device function, and
    puts it back behind each kernel; for each value it makes types and sizes that others have, too.
    """
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    core: Any = importlib.import_module("triton.language.core")
    patch_lang, np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    make = core.tensor.__init__
    blocks: dict[tuple[str, tuple[int, ...]], Any] = {}
    sizes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    @functools.cache
    def once(function: object) -> Any:
        scope = patch_lang(function)
        scope._changes.clear()  # nothing is put back: this process does nothing else
        return scope

    plain = functools.cache(np_dtype)

    def dtype_of(kind: Any) -> Any:
        scalar = kind.scalar
        return np_dtype(scalar) if isinstance(scalar, core.pointer_type) else plain(scalar)

    def block_of(block: Any, scalar: Any) -> Any:
        return block_like(None, scalar, block.shape.values)

    def block_like(_: object, scalar: Any, shape: list[int]) -> Any:
        key = (scalar.name, tuple(shape))
        if key not in blocks:
            blocks[key] = core.block_type(scalar, list(shape))
        return blocks[key]

    def tensor(self: Any, handle: object, kind: Any) -> None:
        shape = tuple(kind.shape.values) if kind.is_block() else ()
        if shape not in sizes:
            make(self, handle, kind)
            sizes[shape] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = sizes[shape]

    interpreter._patch_lang, interpreter._get_np_dtype = once, dtype_of
    interpreter.InterpreterBuilder.get_block_ty = block_like
    core.block_type.with_element_ty, core.tensor.__init__ = block_of, tensor
