"""Every kernel of every op proven on this machine's GPU, or on its CPU where it has none.

Several processes at once, one for each kernel, or for each dtype of one that takes long, those
that take longest first; a crash or a hang is that kernel's verdict and nobody else's. They are
forks of one that has imported everything. ``--save``
adds what ran to the table that is saved already, so that runs of parts make a whole. FlashInfer
compiles attention for minutes: ``python -m benchmarks warm_flashinfer`` does it before.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

import torch_ops
from benchmarks import _proof_job
from torch_ops.declarations import catalogue
from torch_ops.platform import Platform
from torch_ops.selector import static_reasons
from torch_ops.testing.profiles import PROFILES
from torch_ops.testing.proof import proof_of
from torch_ops.testing.reproduction import versions
from torch_ops.testing.search import dtypes_of

DTYPES = ("bfloat16", "float16", "float32", "int32")
RED = ("failed", "too few")
_NOT_BEGUN = "not begun within"
SECONDS = 240.0
SAVED = Path(__file__).with_name("results") / "proof.json"
# What a kernel is taken to need a dtype, in seconds, where no saved table says it.
GUESSES = {"inductor": 60.0, "triton": 20.0, "flashinfer": 20.0}
GUESS = 10.0
LONG = 60.0  # a process that may take longer is split by dtype
# Inductor compiles each class of calls for seconds: so many of them a dtype, and fewer where it
# takes ten seconds or more.
COMPILED_CLASSES = 9
SLOW_CLASSES = dict.fromkeys(("attention", "attention_with_lse", "apply_rope", "apply_rope_"), 6)
_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(["benchmarks._proof_imports"])


class Job(NamedTuple):
    """What one process proves."""

    op: str
    backend: str
    dtypes: tuple[str, ...] = DTYPES

    def __str__(self) -> str:
        whole = set(DTYPES) & set(dtypes_of(self.op))
        dtypes = "" if whole <= set(self.dtypes) else f" {', '.join(self.dtypes)}"
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


Key = tuple[str, str, str]


def _key(cell: Mapping[str, Any]) -> Key:
    return cell["op"], cell["backend"], cell["dtype"]


def timings(saved: Mapping[str, Any]) -> dict[Key, float]:
    """Give the seconds that cells of a saved table took."""
    return {_key(cell): cell["seconds"] for cell in saved.get("cells", ()) if "seconds" in cell}


def expected(job: Job, measured: Mapping[Key, float]) -> float:
    """Give the seconds that a job will take: measured ones, else a guess."""
    guess = GUESSES.get(job.backend, GUESS) * (2 if proof_of(job.op).cost > 1 else 1)
    return sum(measured.get((job.op, job.backend, dtype), guess) for dtype in job.dtypes)


def jobs(
    usable: list[tuple[str, str]], dtypes: tuple[str, ...], measured: Mapping[Key, float]
) -> list[Job]:
    """Split what takes long by dtype, and begin with what takes longest."""
    found = []
    for op, backend in usable:
        whole = Job(op, backend, tuple(d for d in dtypes if d in dtypes_of(op)))
        split = expected(whole, measured) > LONG
        found += [Job(op, backend, (d,)) for d in whole.dtypes] if split else [whole]
    found = [job for job in found if job.dtypes]
    return sorted(found, key=lambda job: (-expected(job, measured), job))


def prove(job: Job, device: str, profile: str) -> dict[str, Any]:
    """Verify one kernel in a process of its own."""
    started = time.monotonic()
    most = SLOW_CLASSES.get(job.op, COMPILED_CLASSES)
    classes = most if job.backend == "inductor" else None
    received, sent = _forked.Pipe(duplex=False)
    arguments = (sent, job.op, job.backend, device, profile, job.dtypes, classes)
    process = _forked.Process(target=_proof_job.work, args=arguments)
    process.start()
    sent.close()
    try:
        done = received.recv() if received.poll(SECONDS) else f"not done in {SECONDS} s"
    except EOFError:
        process.join()
        done = f"exit code {process.exitcode}"
    process.kill()
    process.join()
    if isinstance(done, str):
        return _red(job, done[-1500:])
    verdict: dict[str, Any] = json.loads(json.dumps(done, default=str))
    seconds = round((time.monotonic() - started) / len(job.dtypes), 1)
    for cell in verdict["cells"]:
        cell.update(seconds=seconds, versions=verdict["versions"])
    return verdict


def _red(job: Job, error: str) -> dict[str, Any]:
    cells = [{"dtype": dtype, "verdict": "failed", "reason": error} for dtype in job.dtypes]
    return {"op": job.op, "backend": job.backend, "cells": cells}


def run(
    profile: str = "dev",
    backends: Sequence[str] | None = None,
    ops: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    seconds: float = float("inf"),
) -> dict[str, Any]:
    """Prove the kernels that may run here.

    Args:
        profile: How many examples: ``dev``, ``torch_ops_ci``, ``nightly``, ``soak``.
        backends: Only these; all where None.
        ops: Only these; all where None.
        dtypes: Only these; `DTYPES` where None.
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
    workers = os.cpu_count() or 2

    def one(job: Job) -> dict[str, Any]:
        if time.monotonic() - started > seconds:
            return _red(job, f"{_NOT_BEGUN} {seconds} s")
        verdict = prove(job, device, profile)
        red = [c for c in verdict["cells"] if c["verdict"] in RED]
        took = sum(c.get("seconds", 0.0) for c in verdict["cells"])
        line = f"{job}: {'red' if red else 'ok'} {took:.1f} s"
        line += "".join(f"\n    {c['dtype']}: {c['reason'][:400]}" for c in red)
        print(line, file=sys.stderr, flush=True)
        return verdict

    with ThreadPoolExecutor(workers) as pool:
        saved = json.loads(SAVED.read_text()) if SAVED.exists() else {}
        verdicts = list(pool.map(one, jobs(usable, tuple(dtypes or DTYPES), timings(saved))))
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    same = {"date": _now(), "profile": profile, "versions": versions(name)}
    cells = [
        {"op": verdict["op"], "backend": verdict["backend"], **same, **cell}
        for verdict in verdicts
        for cell in verdict["cells"]
    ]
    return {
        "benchmark": "proof",
        "torch": torch.__version__,
        "device": name or "cpu",
        "profile": profile,
        "seconds": round(time.monotonic() - started, 1),
        "cells": sorted(cells, key=_key),
        "refused": refused,
        "ok": not any(cell["verdict"] in RED for cell in cells),
    }


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: which kernels, how many examples, how long."""
    parser.add_argument("--profile", choices=sorted(PROFILES), default="torch_ops_ci")
    for name, known in (
        ("--op", sorted(catalogue())),
        ("--backend", sorted(backend.value for backend in torch_ops.Backend)),
        ("--dtype", DTYPES),
    ):
        parser.add_argument(
            name, dest=f"{name[2:]}s", action="append", choices=known, help="only this; repeatable"
        )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin with no kernel later than this"
    )


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Add a run to a saved table: of each kernel and dtype the newest cell that was begun stays.

    Raises:
        ValueError: the table is of another benchmark, or of another device.
    """
    for name in ("benchmark", "device"):
        if old and old.get(name) != new[name]:
            msg = f"--save: the file is of {name} {old.get(name)!r} (accepted: {new[name]!r})"
            raise ValueError(msg)
    begun = [cell for cell in new["cells"] if not cell["reason"].startswith(_NOT_BEGUN)]
    cells = {_key(cell): cell for cell in (*old.get("cells", ()), *map(_short, begun))}
    run = {name: new[name] for name in ("profile", "torch", "seconds")}
    run |= {"date": _now(), "cells": len(begun)}
    return {
        "benchmark": new["benchmark"],
        "device": new["device"],
        "ok": not any(cell["verdict"] in RED for cell in cells.values()),
        "runs": [*old.get("runs", ()), run],
        "refused": new["refused"],
        "cells": [cells[key] for key in sorted(cells)],
    }


def _short(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A cell without what a passed one counts in detail."""
    return {name: value for name, value in cell.items() if name != "laws"}


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
