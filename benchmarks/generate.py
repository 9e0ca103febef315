"""Generating with a model of Llama-3.1-8B's shape: transformers eager and compiled, and ours.

Random bfloat16 weights, made where they run. A decode step takes one token of each sequence, the
same tokens for everybody; its time is the median over steps queued one behind the other. The floor
is the time that reading all weights (but embeddings) and all keys and values once takes at the rate
of a copy, measured in the same run. The first token is that of the prompt, uncompiled. TFLOP/s of a
prompt count products and visible pairs. `swap` changes the attention backend in the middle of a
text, goes back, and changes it again, from the same tokens each time.

On a CPU the same runs with a small shape.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import _generation_table, _measure
from benchmarks._generation import Bench, Job, Load
from benchmarks._generators import Eager, Paged, Static

LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    "max_position_embeddings": 256,
}  # fmt: skip
SHAPES = {"llama3-8b": LLAMA, "tiny": TINY}
# In the order of what matters most, in case that time is short.
LOADS = {
    "llama3-8b": {
        "b64x2k": Load(64, 2048), "b16x1k": Load(16, 1024), "b1x1k": Load(1, 1024),
        "swap": Load(16, 1024), "prefill8k": Load(1, 8192),
    },
    "tiny": {
        "b64x2k": Load(4, 48), "b16x1k": Load(3, 32), "b1x1k": Load(1, 32), "swap": Load(3, 32),
        "prefill8k": Load(1, 64),
    },
}  # fmt: skip
STEPS = 24
OUTPUT_SECONDS = 5.0  # of a limit: for what is left to do then
LEFT_OUT = (
    "peak memory: PyTorch counts it on GPUs alone",
    "CUDA graphs: there are none on a CPU; a swap pins what serves pages there already",
)
table, merged, judged = (
    _generation_table.table,
    _generation_table.merged,
    _generation_table.judged,
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run` takes."""
    parser.add_argument("--shape", choices=sorted(SHAPES), help="default: tiny on a CPU")
    parser.add_argument("--workload", action="append", choices=list(LOADS["tiny"]), help="alone")
    parser.add_argument("--steps", type=int, default=STEPS, help="decode steps that are timed")
    parser.add_argument("--seconds", type=float, help="stop then; what is left is listed")
    parser.add_argument("--attention", help="backend of our attention; else torch_ops chooses")
    parser.add_argument("--swap-to", help="where to swap to; else the first that can serve")
    parser.add_argument("--rows", type=Path, help="append each row to this file as it is measured")


def run(
    shape: str | None = None,
    workload: Sequence[str] | None = None,
    steps: int = STEPS,
    seconds: float | None = None,
    attention: str | None = None,
    swap_to: str | None = None,
    rows: Path | None = None,
) -> dict[str, Any]:
    """Measure.

    Args:
        shape: Of `SHAPES`; default the small one on a CPU.
        workload: Of `LOADS`; all where None.
        steps: Decode steps that are timed.
        seconds: When to stop.
        attention: Backend of our attention.
        swap_to: Backend to swap to.
        rows: A file of JSON lines.
    """
    device, started = _measure.device_here(), time.monotonic()
    shape = shape or ("llama3-8b" if device.type == "cuda" else "tiny")
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    report: dict[str, Any] = {
        "benchmark": "generate", **_measure.machine(device), "shape": shape, "rows": [],
        "not_measured": [], "left_out": [] if device.type == "cuda" else list(LEFT_OUT),
    }  # fmt: skip
    waiting = list(_jobs(shape, workload or list(LOADS[shape])))
    limit = None if seconds is None else max(seconds - OUTPUT_SECONDS, seconds / 2)
    try:
        with torch.no_grad(), _measure.limited(limit):
            bench = Bench(SHAPES[shape], device, steps, attention, swap_to)
            while waiting:
                row = {**bench.measure(waiting[0]), "run": now}
                _note(report, row, rows)
                del waiting[0]
    except _measure.OutOfTimeError:
        report["not_measured"] = [f"{job}: not reached within {limit} s" for job in waiting]
    report["seconds"] = round(time.monotonic() - started, 1)
    return judged(report)


def _jobs(shape: str, workloads: Sequence[str]) -> Iterator[Job]:
    """Give the rows of each workload."""
    for workload in workloads:
        load = LOADS[shape][workload]
        if workload == "swap":
            yield Job("swap", workload, load, Paged.name, Paged)
            continue
        kind = "prefill" if workload.startswith("prefill") else "decode"
        if kind == "decode":
            for candidate in (Eager, Static, Paged):
                yield Job(kind, workload, load, candidate.name, candidate)
            continue
        for candidate in (Eager, Paged):
            yield Job(kind, workload, load, candidate.name, candidate)
        yield Job(kind, workload, load, Static.name, Static, prefill=True)
        yield Job(kind, workload, load, f"{Paged.name} compiled", Paged, prefill=True)


def _note(report: dict[str, Any], row: dict[str, Any], rows: Path | None) -> None:
    """Keep a row and show it at once: what comes after can't lose it."""
    report["rows"].append(row)
    line = json.dumps(row)
    print(line, file=sys.stderr, flush=True)
    if rows is not None:
        with rows.open("a") as file:
            file.write(f"{line}\n")
