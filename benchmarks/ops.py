"""Every op on its named calls: all kernels side by side, those alone that prove right.

Each candidate runs on the same arguments. Its results are compared with the float64 oracle within
the derived bound: all of a small call; of a large one rows, or queries and heads, at both ends and
in between. NaN in the memory that outputs come from may be left nowhere, and inputs stay as they
are. A candidate that is wrong or fails gets no time, and the report isn't ok; a reference that is
out of memory gets no time either.

GB/s count bytes read and written once, TFLOP/s of attention the visible pairs alone; `_work` has
the formulas. Times are medians; each candidate has two turns, of which the faster counts, and on a
GPU the L2 cache is cold. "x" is the time over that of the best backend.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_ops
from benchmarks import _calls, _measure, _ops_table, _plots
from benchmarks._ahead import compile_ahead
from benchmarks._calls import EAGER, SELECTED, Candidate, Job, Maker
from benchmarks._work import Work, work
from torch_ops.declarations import catalogue
from torch_ops.testing import subject
from torch_ops.testing.compare import DeviceLostError, ViolationError
from torch_ops.testing.contract import Snapshot, check_fresh
from torch_ops.testing.parts import Expected, check, expected_of, outputs_of
from torch_ops.testing.proof import Arguments, proof_names, proof_of
from torch_ops.testing.spec import Spec
from torch_ops.tuner.timing import captured

DTYPES = ("bfloat16", "float16", "float32")
CPU_WORK = Work(bytes=1 << 24, flops=1 << 31)  # larger calls are left out on a CPU
OUTPUT_SECONDS = 10.0  # of a limit: for tables and plots
TURNS, TURN_MILLISECONDS = 2, 50
KEPT_BYTES = 1 << 33  # of arguments, on a GPU
REFERENCES = (EAGER, "torch", "inductor")  # they hold all logits of attention, which may not fit
AHEAD = ("flashinfer", "inductor", "triton")  # whose kernels are compiled, the slowest first
AHEAD_SECONDS = 150.0
_LOST = (DeviceLostError, torch.AcceleratorError)  # the GPU serves this process no more
_Cell = dict[str, Any]
table = _ops_table.table


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run` takes."""
    parser.add_argument("--op", action="append", choices=sorted(catalogue()), help="these alone")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="these alone")
    parser.add_argument("--seconds", type=float, help="stop then; what is left is listed")
    parser.add_argument(
        "--workers",
        type=int,
        help="processes that compile ahead; 0 on a CPU, else its cores less 2",
    )


def run(
    op: Sequence[str] | None = None,
    dtype: Sequence[str] | None = None,
    seconds: float | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """Check and time.

    Args:
        op: Names of ops; all where None.
        dtype: Names of dtypes; `DTYPES` where None.
        seconds: When to stop; calls that weren't reached are listed as not measured.
        workers: How many processes compile ahead, for at most half of the time.
    """
    device, left_out = _measure.device_here(), list[str]()
    waiting = list(_jobs(op or sorted(catalogue()), dtype or DTYPES, device, left_out))
    return {"benchmark": "ops", **measure(waiting, device, left_out, seconds, workers)}


def measure(
    waiting: list[Job],
    device: torch.device,
    left_out: list[str],
    seconds: float | None = None,
    workers: int | None = None,
    replayed: bool = False,
) -> dict[str, Any]:
    """Check and time calls; gives a report without its name.

    Args:
        waiting: The calls; emptied.
        device: Where they run.
        left_out: Texts that name other calls, and why they aren't measured; those that weren't
            reached are added.
        seconds, workers: As of `run`.
        replayed: Whether a GPU's times are those of CUDA graphs, without launches of the host.
    """
    started = time.monotonic()
    report: dict[str, Any] = {**_measure.machine(device), "rows": [], "not_measured": left_out}
    limit = None if seconds is None else max(seconds - OUTPUT_SECONDS, seconds / 2)
    make = Maker(device, KEPT_BYTES if device.type == "cuda" else 0)
    try:
        with torch.no_grad(), _measure.limited(limit):
            report["ahead"] = _compile_ahead(waiting, device, workers, limit)
            report["copy_tb_s"] = _measure.copy_rate(device)
            while waiting:
                report["rows"].append(row := _row(waiting[0]))
                _measure_one(row, waiting[0], make, replayed)
                del waiting[0]
    except _measure.OutOfTimeError:
        _stop(report, waiting, f"not reached within {limit} s", red=False)
    except _LOST as lost:
        _stop(report, waiting, f"the GPU was lost: {_first_line(lost)}", red=True)
    report["load_after"] = _measure.load()
    report["seconds"] = round(time.monotonic() - started, 1)
    cells = [cell for row in report["rows"] for cell in row["cells"].values()]
    report["ok"] = any("us" in cell for cell in cells) and not any(cell["red"] for cell in cells)
    return report


def save(report: dict[str, Any], path: Path) -> list[Path]:
    """Draw each op beside the report's file; gives the files."""
    found = []
    for op in dict.fromkeys(row["op"] for row in report["rows"]):
        found.append(path.with_name(f"{path.stem}-{op}.svg"))
        _plots.draw(report, op, found[-1])
    return found


def _jobs(
    ops: Sequence[str], dtypes: Sequence[str], device: torch.device, left_out: list[str]
) -> Iterator[Job]:
    """Give what is to be measured, one dtype after the other, and list what isn't."""
    proven = proof_names()
    left_out += [f"{op}: it has no proof" for op in ops if op not in proven]
    for dtype, op in itertools.product(dtypes, [op for op in ops if op in proven]):
        legal = getattr(torch, dtype) in catalogue()[op].dtypes
        specs = _calls.named(op, dtype) if legal else {}
        if not specs:
            left_out.append(
                f"{op} {dtype}: {'no named call' if legal else 'not a dtype of the op'}"
            )
        for name, spec in specs.items():
            job, size = Job(op, dtype, name, spec), work(op, _calls.on_meta(spec))
            over = size.bytes > CPU_WORK.bytes or (size.flops or 0) > (CPU_WORK.flops or 0)
            if device.type == "cpu" and over:
                left_out.append(f"{job}: too large for a CPU, of {_ops_table.amount(size)}")
            else:
                yield job


def _compile_ahead(
    jobs: Sequence[Job], device: torch.device, workers: int | None, limit: float | None
) -> list[str]:
    """Run every call once in other processes; gives what failed there."""
    if workers is None:
        workers = max((os.cpu_count() or 1) - 2, 1) if device.type == "cuda" else 0
    if not workers:
        return []
    groups: dict[tuple[str, str, str], list[Spec]] = {}
    for backend in AHEAD:
        for job in jobs:  # one process for all calls of a kernel: they may share what is compiled
            groups.setdefault((backend, job.op, job.dtype), []).append(job.spec)
    tasks = [_calls.Share(backend, tuple(specs)) for (backend, _, _), specs in groups.items()]
    seconds = AHEAD_SECONDS if limit is None else min(AHEAD_SECONDS, limit / 2)
    return compile_ahead(_calls.run_once, tasks, workers, seconds)


def _row(job: Job) -> dict[str, Any]:
    size = work(job.op, _calls.on_meta(job.spec))
    return {
        "call": str(job), "op": job.op, "name": job.name, "dtype": job.dtype,
        "spec": job.spec.to_json(), "bytes": size.bytes, "flops": size.flops,
        "unit": "GB/s" if size.flops is None else "TFLOP/s",
        "selected": None, "best": None, "checked": [], "cells": {},
    }  # fmt: skip


def _measure_one(row: dict[str, Any], job: Job, make: Maker, replayed: bool) -> None:
    try:
        _fill(row, job, make, replayed)
    except _LOST:
        raise
    except Exception as error:  # of the oracle, or while timing
        _close(row, f"{type(error).__name__}: {error}", red=True)
    gc.collect()
    if make.device.type == "cuda":
        torch.cuda.empty_cache()


def _fill(row: dict[str, Any], job: Job, make: Maker, replayed: bool) -> None:
    """Check every candidate of a call, then time those that are right, in turns."""
    args, device, mutated = make(job.spec), make.device, catalogue()[job.op].mutates
    expected = expected_of(proof_of(job.op), args)
    row["checked"] = [each.part.name for each in expected]
    right: dict[str, Callable[[], Any]] = {}
    for candidate in _calls.candidates(job.op, args, device):
        cell = _judge(row, candidate, args, expected)
        row["cells"][candidate.name] = cell
        if cell["state"] == "right" and candidate.call is not None:
            call = functools.partial(candidate.call, *_calls.copied(args, mutated).values())
            right[candidate.name] = call
    del expected
    replayed = replayed and device.type == "cuda"
    for turn in range(TURNS):
        for name in list(right)[:: -1 if turn % 2 else 1]:
            # Captured anew each time: where outputs lie counts for some of the time, too.
            again = _replayed(right[name], row["cells"][name]) if replayed else right[name]
            found = _measure.spread(again, device, TURN_MILLISECONDS)
            _note_time(row["cells"][name], found, row)
    _compare(row)


def _replayed(call: Callable[[], Any], cell: _Cell) -> Callable[[], Any]:
    """Give what replays a call, or itself, with a note: then launches count."""
    try:
        return captured(call)
    except Exception as error:
        torch.cuda.synchronize()
        cell["launched"] = f"{type(error).__name__}: {_first_line(error)}"[:300]
        return call


def _judge(
    row: dict[str, Any], candidate: Candidate, args: Arguments, expected: Sequence[Expected]
) -> _Cell:
    """Give the verdict on a candidate.

    Raises:
        DeviceLostError: It left the GPU unusable; the row has its cell already.
    """
    if candidate.call is None:
        return _cell("refused", candidate.reason)
    try:
        return _checked(row, candidate.name, candidate.call, args, expected)
    except ViolationError as broken:
        cause = broken.__cause__
        if isinstance(cause, torch.OutOfMemoryError):
            return _cell("memory", str(cause), red=candidate.name not in REFERENCES)
        return _cell("wrong" if cause is None else "failed", broken.detail, red=True)
    except _LOST as lost:
        row["cells"][candidate.name] = _cell("failed", str(lost), red=True)
        raise
    except Exception as error:
        return _cell("failed", f"{type(error).__name__}: {error}", red=True)


def _checked(
    row: dict[str, Any],
    name: str,
    call: Callable[..., Any],
    args: Arguments,
    expected: Sequence[Expected],
) -> _Cell:
    """Run a candidate once on copies, which also compiles it, and check what it gives."""
    op, own, started = row["op"], _calls.copied(args, list(args)), time.monotonic()
    before, mutated = Snapshot.take(own), catalogue()[op].mutates
    _poison(op, args)
    with torch_ops.trace() as seen:
        made = subject.call(subject.subject_of(call), proof_of(op), own)
    took = time.monotonic() - started
    before.check(own, mutated)
    if not mutated:
        check_fresh(made, own, ())
    ratio = check(op, args, made, expected)
    if name == SELECTED:
        row["selected"] = seen.records[0].backend.value
    return _cell("right") | {"error": round(ratio, 4), "first_call_s": round(took, 2)}


def _cell(state: str, reason: str = "", *, red: bool = False) -> _Cell:
    return {"state": state, "reason": " ".join(reason.split())[:300], "red": red}


def _poison(op: str, args: Arguments) -> None:
    device = next(a.device for a in args.values() if isinstance(a, Tensor))
    sizes = [out.numel() * out.element_size() for out in outputs_of(op, args)]
    subject.poison(device, sizes)


def _note_time(cell: _Cell, found: _measure.Spread, row: dict[str, Any]) -> None:
    if found.us < cell.get("us", float("inf")):
        names = zip(("us", "low_us", "high_us"), found, strict=True)
        cell.update({name: round(us, 3) for name, us in names})
        rate = row["bytes"] / 1e3 if row["flops"] is None else row["flops"] / 1e6
        cell["rate"] = float(f"{rate / found.us:.4g}")


def _compare(row: dict[str, Any]) -> None:
    """Give each time over the best backend's."""
    timed = {name: cell["us"] for name, cell in row["cells"].items() if "us" in cell}
    peers = {name: us for name, us in timed.items() if name not in (EAGER, SELECTED)}
    if peers:
        row["best"] = min(peers, key=lambda name: peers[name])
        for name, us in timed.items():
            row["cells"][name]["ratio"] = round(us / peers[row["best"]], 3)


def _stop(report: dict[str, Any], waiting: list[Job], reason: str, *, red: bool) -> None:
    """Note of everything that wasn't reached why; where no candidate is to blame, of all."""
    rows = report["rows"]
    if waiting and rows and rows[-1]["call"] == str(waiting[0]):
        blamed = any(cell["red"] for cell in rows[-1]["cells"].values())
        _close(rows[-1], reason, red=red and not blamed)
        del waiting[0]
    report["not_measured"] += [f"{job}: {reason}" for job in waiting]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _close(row: dict[str, Any], reason: str, *, red: bool = False) -> None:
    """Note why the candidates without a verdict, or a time, have none."""
    for name in _calls.names_of(row["op"]):
        cell = row["cells"].setdefault(name, {"state": "right"})
        if cell["state"] == "right" and "us" not in cell:
            cell.update(_cell("failed" if red else "late", reason, red=red))
    _compare(row)
