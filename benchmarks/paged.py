"""Paged attention and appends: every backend and FlashInfer's own calls side by side.

32 query heads, 8 key heads, head_dim 128, pages of 16 keys, bfloat16. Each candidate is compared
with float64 within the derived bound first; one that is wrong or fails gets no time, and the
report isn't ok. Times are medians with a cold L2 cache; of two turns the faster counts. TB/s are
bytes of keys and values read once (of an append read and written), TFLOP/s the visible pairs.
``--configs`` compares tile sizes of the Triton decode instead.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import os
from typing import Any

import torch

from benchmarks import _calls, _measure
from benchmarks._ahead import compile_ahead
from benchmarks._paged_cases import DECODES, OTHERS, SMALL, Args, Call, Case, make, misses, peers
from torch_ops.declarations import catalogue

TURNS, TURN_MILLISECONDS = 2, 100
AHEAD_SECONDS = 120.0
_REFERENCES = ("torch", "inductor")  # they hold all logits and padded keys, which may not fit
_DECODE = "torch_ops.backends.triton._paged_decode"
_Cell = dict[str, Any]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run` takes."""
    parser.add_argument("--configs", action="store_true", help="tile sizes of Triton's decode")
    parser.add_argument("--no-peers", action="store_true", help="without FlashInfer's own calls")
    parser.add_argument("--only", default="", help="calls whose op and name contain this")


def run(configs: bool = False, no_peers: bool = False, only: str = "") -> dict[str, Any]:
    """Check and time.

    Args:
        configs: Compare tile sizes of the Triton decode, on a GPU.
        no_peers: Leave FlashInfer's own calls out; they may take minutes to compile.
        only: Text that op and name of a call contain, as ``paged_decode b128x4k``.
    """
    device = _measure.device_here()
    report: dict[str, Any] = {"benchmark": "paged", **_measure.machine(device), "rows": []}
    on_gpu = device.type == "cuda"
    report["ahead"] = _compile_configs() if configs and on_gpu else []
    report["copy_tb_s"] = _measure.copy_rate(device)
    cases = (*DECODES, *([] if configs else OTHERS)) if on_gpu else SMALL
    with torch.no_grad():
        for case in cases:
            if only in f"{case.op} {case.name}" and (configs or case.op in catalogue()):
                report["rows"].append(_row(case, device, configs, not (configs or no_peers)))
                gc.collect()
    cells = [cell for row in report["rows"] for cell in row["cells"].values()]
    report["ok"] = any("us" in cell for cell in cells) and not any(cell["red"] for cell in cells)
    return report


def _row(case: Case, device: torch.device, configs: bool, with_peers: bool) -> dict[str, Any]:
    """Check every candidate of a call, then time those that are right, in turns."""
    args = make(case, device)
    calls: dict[str, Call | str] = (
        {**_config_calls(args)} if configs else _backend_calls(case.op, args, device)
    )
    if with_peers:
        calls |= peers(case, args)
    cells: dict[str, _Cell] = {}
    for name, call in calls.items():
        cells[name] = _judged(name, case, args, call)
    for _ in range(TURNS):
        for name, call in calls.items():
            if not cells[name]["reason"] and not isinstance(call, str):
                spread = _measure.spread(call, device, TURN_MILLISECONDS)
                if spread.us < cells[name].get("us", float("inf")):
                    cells[name].update(us=spread.us, low_us=spread.low, high_us=spread.high)
    for cell in cells.values():
        if "us" in cell:
            cell["tb_s"] = case.bytes / cell["us"] / 1e6
            if case.op == "paged_prefill":
                cell["tflop_s"] = case.flops / cell["us"] / 1e6
    return {"op": case.op, "name": case.name, "bytes": case.bytes, "cells": cells}


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:200]


def _judged(name: str, case: Case, args: Args, call: Call | str) -> _Cell:
    if isinstance(call, str):
        return {"red": False, "reason": call}
    try:
        wrong = misses(case, args, call)
    except torch.OutOfMemoryError as error:
        if name not in _REFERENCES:
            return {"red": True, "reason": _text(error)}
        return {"red": False, "reason": f"a reference: {_text(error)}"}
    except torch.AcceleratorError:  # the GPU serves this process no more
        raise
    except Exception as error:  # of the candidate: it is reported, and the run isn't ok
        wrong = _text(error)
    return {"red": wrong is not None, "reason": wrong}


def _backend_calls(op: str, args: Args, device: torch.device) -> dict[str, Call | str]:
    """Give the backends' own functions, or why they don't take the call."""
    found: dict[str, Call | str] = {}
    for candidate in _calls.candidates(op, args, device):
        if candidate.name != _calls.EAGER:
            call = candidate.call
            found[candidate.name] = (
                candidate.reason if call is None else functools.partial(call, *args.values())
            )
    return found


def _config_calls(args: Args) -> dict[str, Call]:
    ours = importlib.import_module(_DECODE)
    tensors = tuple(args.values())
    chosen: dict[str, Call] = {"chosen": functools.partial(ours.forward, *tensors, None, -1, 0.0)}
    return chosen | {
        "-".join(map(str, config)): functools.partial(ours.forward, *tensors, None, -1, 0.0, config)
        for config in ours.CONFIGS
    }


def _compile_configs() -> list[str]:
    numbers = range(len(importlib.import_module(_DECODE).CONFIGS))
    return compile_ahead(compile_config, numbers, max((os.cpu_count() or 1) - 2, 1), AHEAD_SECONDS)


def compile_config(number: int) -> None:
    """Compile one of the tile sizes, in a process of its own."""
    smallest = Case("paged_decode", "cut", (4096,) * 2)  # that needs all kernels
    args = make(smallest, _measure.device_here())
    [*_config_calls(args).values()][number + 1]()


def table(report: dict[str, Any]) -> str:
    """Format the report: microseconds, TB/s and for prefill TFLOP/s of every candidate."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [f"{report['device']}, {versions}", f"copy {report['copy_tb_s']:.3f} TB/s"]
    lines += [f"compiling ahead: {text}" for text in report["ahead"]]
    for row in report["rows"]:
        lines.append(f"{row['op']} {row['name']}, {row['bytes'] / 1e6:.4g} MB")
        for name, cell in row["cells"].items():
            text = cell["reason"] or ""
            if "us" in cell:
                text = f"{cell['us']:10.2f} us {cell['tb_s']:7.3f} TB/s"
                if "tflop_s" in cell:
                    text += f" {cell['tflop_s']:7.1f} TFLOP/s"
            elif cell["red"]:
                text = f"RED {text}"
            lines.append(f"  {name:20} {text}")
    return "\n".join([*lines, "ok" if report["ok"] else "NOT OK"])
