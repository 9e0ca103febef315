"""Compile FlashInfer's kernels ahead, many at a time; each takes nvcc half a minute to two.

Each job is a call through the op, or a layer's preparation, in a process of its own, the longest
first. ``python -m benchmarks.warm_flashinfer --all`` compiles every variant that the backend has.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch

HEAD_DIMS = (128, 64, 256)
DTYPES = ("bfloat16", "float16")
COMPILERS = 2  # processes of nvcc in a job
LONGEST_S = 900
_SETUP = """
import torch, torch_ops
from torch_ops import ops
from torch_ops.attention import Attention

def new(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype, device="cuda")

def kernel(op):
    return torch_ops.get_kernel(op, "flashinfer")
"""
_ROWS = {
    "norm": 'ops.rms_norm(new(1, 64), new(64), backend="flashinfer")',
    "silu_and_mul": 'ops.silu_and_mul(new(1, 64), backend="flashinfer")',
    "gelu_and_mul": 'ops.gelu_and_mul(new(1, 64), backend="flashinfer")',
    "gelu_tanh_and_mul": 'kernel("gelu_tanh_and_mul")(new(1, 64))',
    "rope": (
        "ops.apply_rope(new(1, 1, 64), new(1, 1, 64), new(1, 64, dtype=torch.float32), "
        'new(1, dtype=torch.int64), backend="flashinfer")'
    ),
    "cascade": (
        'kernel("merge_state")(*[new(1, 1, 64), new(1, 1, dtype=torch.float32)] * 2)'
    ),
    "gemm": (
        "ops.scaled_mm_fp8(new(16, 16, dtype=torch.float8_e4m3fn), "
        "new(16, 16, dtype=torch.float8_e4m3fn).t(), *[new(1, dtype=torch.float32)] * 2, "
        'torch.bfloat16, backend="flashinfer")'
    ),
}  # fmt: skip
_LATENTS = (
    "first = new(1, dtype=torch.int32)\n"
    "tables = torch.cat([first, first + 1]), first, first + 1\n"
    "q, pe = (new(1, 16, width, dtype=torch.{dtype}) for width in (512, 64))\n"
    "caches = (new(1, 64, width, dtype=torch.{dtype}) for width in (512, 64))\n"
    'ops.mla_decode(q, pe, *caches, *tables, 0.1, backend="flashinfer")'
)


@dataclass(frozen=True)
class Job:
    """Code that makes FlashInfer compile one thing."""

    name: str
    code: str


def jobs(everything: bool = False) -> Iterator[Job]:
    """Give what to compile: what the tests need, or every variant."""
    for windowed in (True, False):
        for dtype in DTYPES:
            for head_dim in HEAD_DIMS:
                if everything or dtype == "bfloat16" or head_dim == 128:
                    yield from (_dense(head_dim, dtype, windowed, batch) for batch in (2, 1))
    for windowed in (True, False):
        for dtype in DTYPES:
            for head_dim in HEAD_DIMS:
                if everything or (dtype == "bfloat16" and (head_dim == 128 or not windowed)):
                    yield _layer(head_dim, dtype, windowed)
    for dtype in DTYPES:
        yield Job(f"latents: {dtype}", _LATENTS.format(dtype=dtype))
    for name, code in _ROWS.items():
        yield Job(name, code)


def _named(head_dim: int, dtype: str, windowed: bool) -> str:
    return f"{dtype}, head_dim {head_dim}" + (", windowed" if windowed else "")


def _dense(head_dim: int, dtype: str, windowed: bool, batch: int) -> Job:
    """A call, which takes FA3 where the GPU has it; batches have a kernel of their own."""
    tensor = f"new({batch}, 1, 1, {head_dim}, dtype=torch.{dtype})"
    window = 1 if windowed else -1
    return Job(
        f"prefill of {batch}: {_named(head_dim, dtype, windowed)}",
        f'ops.attention(*[{tensor}] * 3, window_left={window}, backend="flashinfer")',
    )


def _layer(head_dim: int, dtype: str, windowed: bool) -> Job:
    """A layer on FA2, prepared for sequences and for batches of them."""
    tensor = f"new(1, 1, 1, {head_dim}, dtype=torch.{dtype})"
    window = 1 if windowed else -1
    return Job(
        f"layer on FA2: {_named(head_dim, dtype, windowed)}",
        f"Attention(1, {head_dim}, window_left={window}, backend='flashinfer_fa2')"
        f"(*[{tensor}] * 3)",
    )


def _compile(job: Job) -> dict[str, Any]:
    started = time.monotonic()
    command = [sys.executable, "-c", f"{_SETUP}\n{job.code}\ntorch.cuda.synchronize()\n"]
    env = os.environ | {"MAX_JOBS": str(COMPILERS)}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=LONGEST_S, check=False
        )
        error = "" if done.returncode == 0 else (done.stderr.strip() or f"exit {done.returncode}")
    except subprocess.TimeoutExpired:
        error = f"took longer than {LONGEST_S} s"
    seconds = round(time.monotonic() - started, 1)
    return {"name": job.name, "seconds": seconds, "error": error[-2000:]}


def run(everything: bool = False, workers: int | None = None) -> dict[str, Any]:
    """Compile, and tell of each job on stderr when it is done."""
    wanted, started = list(jobs(everything)), time.monotonic()
    results = []
    count = workers or max((os.cpu_count() or 2) // COMPILERS, 1)
    with ThreadPoolExecutor(count) as pool:
        for future in as_completed([pool.submit(_compile, job) for job in wanted]):
            result = future.result()
            results.append(result)
            outcome = result["error"].splitlines()[-1] if result["error"] else "ok"
            told = f"{len(results)}/{len(wanted)} {result['seconds']:6.1f} s {result['name']}"
            print(f"{told}: {outcome}", file=sys.stderr, flush=True)
    return {
        "jobs": results,
        "seconds": round(time.monotonic() - started, 1),
        "workers": count,
        "torch": torch.__version__,
        "ok": not any(result["error"] for result in results),
    }


def table(report: dict[str, Any]) -> str:
    """Give the failures in full, and how long it took."""
    failed = [result for result in report["jobs"] if result["error"]]
    lines = [f"{result['name']} failed:\n{result['error']}\n" for result in failed]
    count = len(report["jobs"])
    total = f"{count - len(failed)} of {count} compiled in {report['seconds']} s"
    return "\n".join([*lines, f"{total}, {report['workers']} at a time"])


def main() -> int:
    """Compile what is asked for and give the exit code: 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every variant, not the tests' alone")
    parser.add_argument("--list", action="store_true", help="print the jobs and compile nothing")
    parser.add_argument("--workers", type=int, help="jobs at a time; default half of the CPUs")
    options = parser.parse_args()
    if options.list:
        print("\n".join(job.name for job in jobs(options.all)))
        return 0
    report = run(options.all, options.workers)
    print(table(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
