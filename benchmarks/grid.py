"""Calls of models, decoding and reading prompts: every kernel beside the one that is selected.

Shapes are those of Llama 3 8B and 70B, Qwen3-30B-A3B, DeepSeek-V3 and Gemma 3. Candidates are
checked as in ``python -m benchmarks ops`` and timed alike, but replayed from CUDA graphs, as the
tuner times them: in a compiled model the host's launches are nobody's time. ``selected`` is the op
as a user calls it, with the tuning table that holds for the device. ``--shapes FILE`` writes the
calls for ``torch-ops tune --shapes FILE`` and measures nothing. On a CPU the calls are of
memory-bound ops, float32 and bfloat16, from 1 to 350 MB.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _calls, _measure, _plots, ops
from benchmarks._calls import EAGER, SELECTED, Job
from benchmarks._ops_table import table as ops_table
from benchmarks._work import work
from torch_ops.declarations import catalogue
from torch_ops.tuner import shapes
from torch_ops.tuner.models import MODELS, Model

# Tokens of a step that decodes 1, 16 and 128 sequences, and of a prompt.
DECODE, PROMPT = (1, 16, 128), 8192
SEQUENCES = ((16, 4096), (128, 1024))  # that are decoded, and the keys of each
ROWS = (
    "rms_norm", "fused_add_rms_norm", "apply_rope", "quantize_fp8_per_token", "rms_norm_quant_fp8",
)  # fmt: skip
GATES = {"gemma3": "gelu_tanh_and_mul"}
ROUTES = {"topk_softmax": "bfloat16", "moe_align_block_size": "int32"}
CPU_OPS = (
    "rms_norm", "fused_add_rms_norm", "gemma_rms_norm", "layer_norm", "silu_and_mul",
    "gelu_and_mul", "gelu_tanh_and_mul", "apply_rope",
)  # fmt: skip
CPU_TOKENS, CPU_DTYPES, CPU_BYTES = (64, 512, 2048), ("float32", "bfloat16"), 1 << 20
PEERS = ("flashinfer", "sgl_kernel")
# Times of the selected kernel over the best one's; those of peers and of eager over its own.
LIMITS = {"worst": 1.03, "mean": 1.01, "peer": 1.15, "eager": 1.0, "cells": 80}
CPU_LIMIT = 2.0


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run` takes."""
    parser.add_argument("--op", action="append", choices=sorted(catalogue()), help="these alone")
    parser.add_argument("--seconds", type=float, help="stop then; what is left is listed")
    parser.add_argument("--workers", type=int, help="processes that compile ahead")
    parser.add_argument("--shapes", type=Path, help="write the calls there and measure nothing")


def run(
    op: Sequence[str] | None = None,
    seconds: float | None = None,
    workers: int | None = None,
    shapes: Path | None = None,
) -> dict[str, Any]:
    """Check, time and compare.

    Args:
        op: Names of ops; all where None.
        seconds: When to stop; calls that weren't reached are listed as not measured.
        workers: How many processes compile ahead, for at most half of the time.
        shapes: A file to write the calls to, in place of measuring.
    """
    device, left_out = _measure.device_here(), list[str]()
    waiting = [job for job in jobs(device.type) if not op or job.op in op]
    if shapes is not None:
        shapes.write_text(json.dumps(listed(waiting), indent=1) + "\n")
        return {"benchmark": "grid", "shapes": str(shapes), "cells": len(waiting), "ok": True}
    report = ops.measure(waiting, device, left_out, seconds, workers, replayed=True)
    report |= {"benchmark": "grid", "summary": summary(report["rows"], device.type)}
    report["ok"] = report["ok"] and not report["summary"]["over"]
    return report


def jobs(device: str) -> list[Job]:
    """Give the calls that are measured on a kind of device."""
    if device == "cpu":
        return [job for job in _cpu() if _bytes(job) >= CPU_BYTES]
    return [job for name, model in MODELS.items() for job in _of_model(name, model)]


def _bytes(job: Job) -> int:
    return work(job.op, _calls.on_meta(job.spec)).bytes


def _cpu() -> Iterator[Job]:
    model = MODELS["llama3-8b"]
    for op in CPU_OPS:
        for dtype in CPU_DTYPES:
            for tokens in CPU_TOKENS:
                yield _job(op, "llama3-8b", model, {"tokens": tokens}, f"{tokens} tokens", dtype)


def _of_model(name: str, model: Model) -> Iterator[Job]:
    for op in (*ROWS, GATES.get(name, "silu_and_mul")):
        for tokens in (*DECODE, PROMPT):
            yield _job(op, name, model, {"tokens": tokens}, f"{tokens} tokens")
    for op, dtype in ROUTES.items() if model.experts else ():
        for tokens in (DECODE[-1], PROMPT):
            yield _job(op, name, model, {"tokens": tokens}, f"{tokens} tokens", dtype)
    if "deepseek" in name:  # its attention is another op's
        return
    for batch, keys in SEQUENCES:
        counts = {"batch": batch, "qo": 1, "kv": keys}
        yield _job("paged_decode", name, model, counts, f"{batch} x {keys} keys")
    counts = {"batch": 1, "qo": PROMPT, "kv": PROMPT}
    yield _job("varlen_attention", name, model, counts, f"{PROMPT} tokens")


def _job(
    op: str,
    name: str,
    model: Model,
    counts: Mapping[str, int],
    what: str,
    dtype: str = "bfloat16",
) -> Job:
    """Exchange the sizes of an op's first named example for a model's."""
    base = shapes.example(op, dtype)
    assert base is not None
    sizes = {size: values[0] for size, values in model.sizes.items() if size in base.dim}
    numbers = {"k": model.top_k, "num_experts": model.experts} if model.experts else {}
    params = {n: value for n, value in numbers.items() if n in base.param}
    spec = shapes.altered(base, sizes | dict(counts), params)
    return Job(op, dtype, f"{name}, {what}", spec)


def listed(found: Sequence[Job]) -> dict[str, list[dict[str, Any]]]:
    """Give the calls as a file of shapes holds them, for whatever dtype.

    See `torch_ops.tuner.shapes.of_file`.
    """
    calls: dict[str, list[dict[str, Any]]] = {}
    for job in found:
        base = shapes.example(job.op, job.dtype)
        assert base is not None
        sizes = {n: size for n, size in job.spec.dims if size != base.dim[n]}
        params = {n: value for n, value in job.spec.params if value != base.param[n]}
        call, of_op = sizes | params, calls.setdefault(job.op, [])
        if call not in of_op:
            of_op.append(call)
    return calls


def summary(rows: Sequence[Mapping[str, Any]], device: str) -> dict[str, Any]:
    """Compare the selected kernel with the best one, with each peer alone and with eager PyTorch.

    Returns:
        ``over_best``: times over the best backend's, ``worst`` and geometric ``mean``.
        ``eager`` and each peer: their times over the selected kernel's in the cells they serve,
        ``mean`` and ``least``, without calls that had to be launched since they wait for the GPU:
        who runs them plans ahead. ``over``: what exceeds its limit, as text.
    """
    cells = [(row["call"], _times(row)) for row in rows]
    launched = {row["call"]: _launched(row) for row in rows}
    timed = [
        (call, times)
        for call, times in cells
        if SELECTED in times and times.keys() - {EAGER, SELECTED}
    ]
    over_best = {call: times[SELECTED] / _best(times) for call, times in timed}
    found: dict[str, Any] = {"cells": len(timed), "limits": LIMITS, "over_best": _spread(over_best)}
    for peer in (EAGER, *PEERS):
        ratios = {
            call: t[peer] / t[SELECTED]
            for call, t in timed
            if peer in t and peer not in launched[call]
        }
        if ratios:
            found[peer] = _spread(ratios)
    found["over"] = list(_over(found, over_best, device))
    return found


def _times(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: cell["us"] for name, cell in row["cells"].items() if "us" in cell}


def _launched(row: Mapping[str, Any]) -> set[str]:
    return {name for name, cell in row["cells"].items() if "launched" in cell}


def _best(times: Mapping[str, float]) -> float:
    return min(us for name, us in times.items() if name not in (EAGER, SELECTED))


def _spread(ratios: Mapping[str, float]) -> dict[str, Any]:
    if not ratios:
        return {"cells": 0}
    mean = math.exp(math.fsum(map(math.log, ratios.values())) / len(ratios))
    least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    return {
        "cells": len(ratios), "mean": round(mean, 4),
        "least": round(ratios[least], 4), "of_least": least,
        "worst": round(ratios[most], 4), "of_worst": most,
    }  # fmt: skip


def _over(found: Mapping[str, Any], over_best: Mapping[str, float], device: str) -> Iterator[str]:
    for call, ratio in over_best.items():
        if ratio > LIMITS["worst"]:
            yield f"{call}: {ratio:.3f} of the best (limit {LIMITS['worst']})"
    mean = found["over_best"].get("mean", math.inf)
    if mean > LIMITS["mean"]:
        yield f"geometric mean: {mean:.3f} of the best (limit {LIMITS['mean']})"
    eager = found.get(EAGER, {"mean": 0.0, "least": 0.0})
    if device == "cpu":
        if eager["mean"] < CPU_LIMIT:
            yield f"eager PyTorch takes {eager['mean']:.3f} of the time (limit {CPU_LIMIT})"
        return
    if found["cells"] < LIMITS["cells"]:
        yield f"{found['cells']} cells (limit {LIMITS['cells']})"
    if eager["least"] < LIMITS["eager"]:
        yield f"{eager.get('of_least')}: eager PyTorch takes {eager['least']:.3f} of the time"
    for peer in PEERS:
        mean = found.get(peer, {}).get("mean", 0.0)
        if mean < LIMITS["peer"]:
            yield f"{peer} alone takes {mean:.3f} of the time (limit {LIMITS['peer']})"


def table(report: dict[str, Any]) -> str:
    """Format the report for people: the ops' tables, then the comparison."""
    if "rows" not in report:
        return f"{report['cells']} calls written to {report['shapes']}"
    lines = [ops_table(report), ""]
    for name, spread in report["summary"].items():
        if isinstance(spread, dict) and "least" in spread:
            what = "selected over the best" if name == "over_best" else f"{name} over selected"
            lines.append(
                f"{what}: mean {spread['mean']}, {spread['least']} ({spread['of_least']}) to "
                f"{spread['worst']} ({spread['of_worst']}), {spread['cells']} cells"
            )
    return "\n".join([*lines, *(f"OVER: {text}" for text in report["summary"]["over"])])


def save(report: dict[str, Any], path: Path) -> list[Path]:
    """Draw the cells beside the report's file; gives the file."""
    if not report.get("rows"):
        return []
    _plots.ratios(report, path.with_suffix(".svg"))
    return [path.with_suffix(".svg")]
