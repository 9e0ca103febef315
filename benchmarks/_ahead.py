"""Compiling ahead in worker processes, for the compilers' caches on disk."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

_Function = Callable[[Any], None]


def compile_ahead(
    function: _Function, tasks: Sequence[Any], workers: int, seconds: float
) -> list[str]:
    """Run a function of a module on every task, by processes of which each takes every n-th.

    Args:
        function: Runs one task; what it raises is noted, and found again by who needs the task.
        tasks: Picklable; their text names them.
        workers: How many processes.
        seconds: Workers that take longer are killed, with the compilers that they started.

    Returns:
        What failed, and who was killed.
    """
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ.setdefault("MAX_JOBS", "2")  # of nvcc, in each worker
    context = multiprocessing.get_context("spawn")
    problems: Any = context.Queue()
    started: list[Any] = [
        context.Process(target=_work, args=(function, tasks[i::workers], problems))
        for i in range(min(workers, len(tasks)))
    ]
    deadline, found = time.monotonic() + seconds, list[str]()
    try:
        for worker in started:
            worker.start()
        while any(worker.is_alive() for worker in started) and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                found.append(problems.get(timeout=0.2))
    finally:
        found += [f"worker {w.pid}: not done in {seconds:.0f} s" for w in started if w.is_alive()]
        found += [f"worker {w.pid}: exit code {w.exitcode}" for w in started if w.exitcode]
        for worker in started:
            _end(worker)
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(problems.get(timeout=0.5))
    return found


def _end(worker: Any) -> None:
    """Kill a worker and its compilers: while times are taken nothing else may run."""
    if worker.pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.kill()
    worker.join()


def _work(function: _Function, tasks: Sequence[Any], problems: Any) -> None:
    """Run a worker's share, in a process group of its own."""
    os.setpgrp()
    for task in tasks:
        try:
            function(task)
        except Exception as error:  # whoever needs the task meets it again
            problems.put(f"{task}: {type(error).__name__}: {str(error)[:200]}")
