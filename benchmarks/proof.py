"""Every kernel of every op proven on this machine's GPU, or on its CPU where it has none.

Several processes at once, one for each kernel, or for each dtype of a costly one; a crash or a hang
is that kernel's verdict and nobody else's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

import torch_ops
from torch_ops.declarations import catalogue
from torch_ops.platform import Platform
from torch_ops.selector import static_reasons
from torch_ops.testing.proof import proof_of

DTYPES = ("bfloat16", "float16", "float32")
RED = ("failed", "too few")
SECONDS = 240.0
# Inductor compiles each class of calls for seconds: so many of them a dtype.
COMPILED_CLASSES = 6
_ONE = """
import json, sys
from torch_ops.testing.verify import verify
op, backend, device, profile, dtypes, classes = json.loads(sys.argv[1])
result = verify(op, backend, device=device, profile=profile, dtypes=dtypes, max_classes=classes)
print("RESULT " + json.dumps(result.to_dict(), default=str))
"""


class Job(NamedTuple):
    """What one process proves."""

    op: str
    backend: str
    dtypes: tuple[str, ...] = DTYPES

    def __str__(self) -> str:
        dtypes = "" if self.dtypes == DTYPES else f" {', '.join(self.dtypes)}"
        return f"{self.op}/{self.backend}{dtypes}"


def kernels() -> tuple[list[tuple[str, str]], dict[str, str]]:
    """List the kernels that may run here as (op, backend), and why the others may not."""
    platform = Platform.detect()
    usable, refused = [], {}
    for op in catalogue():
        for spec in torch_ops.registry.get(op):
            reasons = static_reasons(spec, platform)
            if reasons:
                refused[f"{op}/{spec.backend.value}"] = "; ".join(reasons)
            else:
                usable.append((op, spec.backend.value))
    return usable, refused


def _jobs(usable: list[tuple[str, str]]) -> list[Job]:
    """Split what takes longest by dtype, and begin with it."""
    jobs = []
    for op, backend in usable:
        costly = proof_of(op).cost > 1 or backend == "inductor"
        jobs += [Job(op, backend, (d,)) for d in DTYPES] if costly else [Job(op, backend)]
    return sorted(jobs, key=lambda job: (len(job.dtypes), -proof_of(job.op).cost, job))


def prove(job: Job, device: str, profile: str) -> dict[str, Any]:
    """Verify one kernel in a process of its own."""
    started = time.monotonic()
    classes = COMPILED_CLASSES if job.backend == "inductor" else None
    call = json.dumps([job.op, job.backend, device, profile, list(job.dtypes), classes])
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ONE, call],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # as many processes as cores
        )
    except subprocess.TimeoutExpired:
        return _red(job, f"not done in {SECONDS} s")
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return _red(job, f"exit code {done.returncode}: {done.stderr[-1500:]}")
    verdict: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return {**verdict, "seconds": round(time.monotonic() - started, 1)}


def _red(job: Job, error: str) -> dict[str, Any]:
    cells = [{"dtype": dtype, "verdict": "failed", "reason": error} for dtype in job.dtypes]
    return {"op": job.op, "backend": job.backend, "cells": cells}


def run(
    profile: str = "dev",
    backends: tuple[str, ...] | None = None,
    ops: tuple[str, ...] | None = None,
    seconds: float = float("inf"),
) -> dict[str, Any]:
    """Prove the kernels that may run here.

    Args:
        profile: How many examples: ``dev``, ``torch_ops_ci``, ``nightly``, ``soak``.
        backends: Only these; all where None.
        ops: Only these; all where None.
        seconds: No kernel is begun later than this; those left out are red.
    """
    started = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    usable, refused = kernels()
    usable = [
        (op, backend)
        for op, backend in usable
        if (backends is None or backend in backends) and (ops is None or op in ops)
    ]
    workers = max(1, (os.cpu_count() or 2) - 2)

    def one(job: Job) -> dict[str, Any]:
        if time.monotonic() - started > seconds:
            return _red(job, f"not begun within {seconds} s")
        verdict = prove(job, device, profile)
        red = [c for c in verdict["cells"] if c["verdict"] in RED]
        line = f"{job}: {'red' if red else 'ok'} {verdict.get('seconds')} s"
        line += "".join(f"\n    {c['dtype']}: {c['reason'][:400]}" for c in red)
        print(line, file=sys.stderr, flush=True)
        return verdict

    with ThreadPoolExecutor(workers) as pool:
        verdicts = list(pool.map(one, _jobs(usable)))
    cells = [
        {"op": verdict["op"], "backend": verdict["backend"], **cell}
        for verdict in verdicts
        for cell in verdict["cells"]
    ]
    return {
        "benchmark": "proof",
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "profile": profile,
        "seconds": round(time.monotonic() - started, 1),
        "cells": sorted(cells, key=lambda cell: (cell["op"], cell["backend"], cell["dtype"])),
        "refused": refused,
        "ok": not any(cell["verdict"] in RED for cell in cells),
    }


def table(report: dict[str, Any]) -> str:
    """Format the report for people: a line for each kernel and dtype."""
    lines = [
        f"{report['device']}, torch {report['torch']}, profile {report['profile']}, "
        f"{report['seconds']} s"
    ]
    for cell in report["cells"]:
        refused = sum(cell.get("refused", {}).values())
        lines.append(
            f"{cell['op']:22}{cell['backend']:12}{cell['dtype']:10}{cell['verdict']:12}"
            f"{cell.get('executed', 0):5} examples, {refused} refused, "
            f"{cell.get('ratio', 0.0):.3f} of the bound  {cell['reason'][:300]}"
        )
        laws = cell.get("laws_refused", {})
        if laws and cell["verdict"] == "passed":
            lines.append(f"    laws about calls that it refuses: {', '.join(laws)}")
        lines += [f"    {_failure(failure)}" for failure in cell.get("failures", ())[:2]]
    lines += [f"refused: {name}: {why}" for name, why in report["refused"].items()]
    return "\n".join(lines)


def _failure(failure: dict[str, Any]) -> str:
    return f"[{failure['phase']}/{failure['layer']}] {failure['detail']}\n    {failure['again']}"
