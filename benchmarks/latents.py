"""Latent attention of DeepSeek-V3: backends, tile sizes and FlashInfer's planned calls.

Latents of 512 and rotated parts of 64 elements side by side in one cache, bfloat16, pages of 64
tokens in random order: 128 heads, or the 16 that each of 8 GPUs has. Each candidate is compared
with float64 within the derived bound first; one that is wrong or fails gets no time, and the report
isn't ok. Times are medians with a cold L2 cache; of two turns the faster counts. TB/s are bytes of
the cache read once, TFLOP/s the products of all heads. ``--configs`` compares tile sizes of
Triton's kernel instead.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import _calls, _measure
from torch_ops.testing import build, parts
from torch_ops.testing.proof import Arguments, proof_of
from torch_ops.testing.proofs import _latents
from torch_ops.testing.proofs._ragged import spec_of
from torch_ops.testing.spec import Operand

OP, PAGE, LATENT, ROTATED = "mla_decode", 64, 512, 64
CASES = ((128, 1, 4096), (128, 64, 4096), (128, 128, 4096), (16, 1, 4096), (16, 128, 4096))
"""Heads, sequences, and tokens of each."""
SMALL = ((4, 1, 9),)
TURNS, TURN_MILLISECONDS = 2, 100
_TRITON = "torch_ops.backends.triton._mla_decode"
_ROOM = 128 << 20
_REFERENCES = ("torch", "eager")  # they hold all logits and padded keys, which may not fit
_Call = Callable[[], Any]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run` takes."""
    parser.add_argument("--configs", action="store_true", help="tile sizes of Triton's kernel")
    parser.add_argument("--no-peers", action="store_true", help="without FlashInfer's own calls")


def run(configs: bool = False, no_peers: bool = False) -> dict[str, Any]:
    """Check and time.

    Args:
        configs: Compare tile sizes of the Triton kernel, on a GPU.
        no_peers: Leave FlashInfer's own calls out; they may take minutes to compile.
    """
    device = _measure.device_here()
    report: dict[str, Any] = {"benchmark": "latents", **_measure.machine(device), "rows": []}
    report["copy_tb_s"] = _measure.copy_rate(device)
    with torch.no_grad():
        for case in CASES if device.type == "cuda" else SMALL:
            report["rows"].append(_row(*case, device, configs, not (configs or no_peers)))
            gc.collect()
    cells = [cell for row in report["rows"] for cell in row["cells"].values()]
    report["ok"] = any("us" in cell for cell in cells) and not any(cell["red"] for cell in cells)
    return report


def _row(
    heads: int, batch: int, tokens: int, device: torch.device, configs: bool, with_peers: bool
) -> dict[str, Any]:
    """Check every candidate of a call, then time those that are right, in turns."""
    dims = {
        "batch": batch, "qo": 1, "kv": tokens, "heads": heads, "latent": LATENT, "rope": ROTATED,
        "page_size": PAGE, "pad": 0, "spare": 1,
    }  # fmt: skip
    look = {"q_nope": Operand("bfloat16")}
    spec = spec_of(OP, _latents.FORM, dims, look, {"scale": _latents.DEEPSEEK_SCALE})
    args = build(spec, device)
    pool = torch.cat([args["ckv_cache"], args["kpe_cache"]], -1)  # as servers keep them
    args |= {"ckv_cache": pool[..., :LATENT], "kpe_cache": pool[..., LATENT:]}
    expected = parts.expected_of(proof_of(OP), args)
    calls = _config_calls(args) if configs else _backend_calls(args, device)
    if with_peers:
        calls |= _peers(args)
    cells = {name: _judged(name, args, call, expected) for name, call in calls.items()}
    for _ in range(TURNS):
        for name, call in calls.items():
            if not cells[name]["reason"] and not isinstance(call, str):
                us = _measure.spread(call, device, TURN_MILLISECONDS).us
                cells[name]["us"] = min(us, cells[name].get("us", us))
    size = 2 * batch * tokens * (LATENT + ROTATED)
    flops = 2 * heads * batch * tokens * (2 * LATENT + ROTATED)
    for cell in cells.values():
        if "us" in cell:
            cell |= {"tb_s": size / cell["us"] / 1e6, "tflop_s": flops / cell["us"] / 1e6}
    return {"name": f"{heads} heads, {batch}x{tokens}", "cells": cells}


def _judged(name: str, args: Arguments, call: _Call | str, expected: Any) -> dict[str, Any]:
    if isinstance(call, str):
        return {"red": False, "reason": call}
    try:
        parts.check(OP, args, (call(),), expected)
    except torch.AcceleratorError:  # the GPU serves this process no more
        raise
    except Exception as error:  # of the candidate: it is reported, and the run isn't ok
        room = isinstance(error, torch.OutOfMemoryError) and name in _REFERENCES
        text = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
        return {"red": not room, "reason": text}
    return {"red": False, "reason": None}


def _backend_calls(args: Arguments, device: torch.device) -> dict[str, _Call | str]:
    """Give the backends' own functions, or why they don't take the call."""
    return {
        each.name: each.reason if each.call is None else functools.partial(
            each.call, *args.values()
        )
        for each in _calls.candidates(OP, args, device)
    }  # fmt: skip


def _config_calls(args: Arguments) -> dict[str, _Call | str]:
    ours = importlib.import_module(_TRITON)
    forward = functools.partial(ours.forward, *args.values())
    found: dict[str, _Call | str] = {"chosen": forward}
    for config in ours.CONFIGS:
        found["-".join(map(str, config))] = functools.partial(forward, config)
    return found


def _peers(args: Arguments) -> dict[str, _Call | str]:
    """Give FlashInfer's own calls, planned."""
    if importlib.util.find_spec("flashinfer") is None or not args["q_nope"].is_cuda:
        return {}
    mla = importlib.import_module("flashinfer.mla")
    tensors = [args[n] for n in ("q_nope", "q_pe", "ckv_cache", "kpe_cache")]
    batch, heads, _ = tensors[0].shape
    starts = torch.arange(batch + 1, dtype=torch.int32)
    lengths = torch.tensor([len(r.keys[0]) for r in _latents.FORM.runs(args)], dtype=torch.int32)
    found: dict[str, _Call | str] = {}
    for family in ("fa2", "fa3"):
        room = torch.zeros(_ROOM, dtype=torch.uint8, device=tensors[0].device)
        wrapper = mla.BatchMLAPagedAttentionWrapper(room, backend=family)
        table = args["kv_indptr"].cpu(), args["kv_indices"], lengths
        sizes = heads, LATENT, ROTATED, PAGE, False, args["scale"]
        wrapper.plan(starts, *table, *sizes, tensors[0].dtype, tensors[0].dtype)
        found[f"flashinfer {family}, planned"] = functools.partial(wrapper.run, *tensors)
    return found


def table(report: dict[str, Any]) -> str:
    """Format the report: microseconds, TB/s and TFLOP/s of every candidate."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [f"{report['device']}, {versions}", f"copy {report['copy_tb_s']:.3f} TB/s"]
    for row in report["rows"]:
        lines.append(row["name"])
        for name, cell in row["cells"].items():
            text = f"{'RED ' if cell['red'] else ''}{cell['reason']}"
            if "us" in cell:
                text = f"{cell['us']:10.2f} us {cell['tb_s']:7.3f} TB/s"
                text += f" {cell['tflop_s']:7.1f} TFLOP/s"
            lines.append(f"  {name:24} {text}")
    return "\n".join([*lines, "ok" if report["ok"] else "NOT OK"])
