"""Every kernel of every op proven on this machine's GPU, or on its CPU where it has none.

One process a kernel, several at once; a crash or a hang is that kernel's verdict and nobody else's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import torch_ops
from torch_ops.declarations import catalogue
from torch_ops.platform import Platform
from torch_ops.selector import static_reasons

DTYPES = ("bfloat16", "float16", "float32")
SECONDS = 240.0
_ONE = """
import json, sys
from torch_ops.testing.verify import verify
op, backend, device, profile, dtypes = json.loads(sys.argv[1])
result = verify(op, backend, device=device, profile=profile, dtypes=dtypes)
print("RESULT " + json.dumps(result.to_dict(), default=str))
"""


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


def prove(op: str, backend: str, device: str, profile: str) -> dict[str, Any]:
    """Verify one kernel in a process of its own."""
    started = time.monotonic()
    call = json.dumps([op, backend, device, profile, list(DTYPES)])
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
        return {"op": op, "backend": backend, "ok": False, "error": f"not done in {SECONDS} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    verdict: dict[str, Any] = {"op": op, "backend": backend, "ok": False}
    if lines:
        verdict.update(json.loads(lines[-1].removeprefix("RESULT ")))
    else:
        verdict["error"] = f"exit code {done.returncode}: {done.stderr[-1500:]}"
    verdict["seconds"] = round(time.monotonic() - started, 1)
    return verdict


def run(
    profile: str = "dev", backends: tuple[str, ...] | None = None, seconds: float = float("inf")
) -> dict[str, Any]:
    """Prove the kernels that may run here.

    Args:
        profile: How many examples: ``dev``, ``torch_ops_ci``, ``nightly``, ``soak``.
        backends: Only these; all where None.
        seconds: No kernel is begun later than this; those left out are red.
    """
    started = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    usable, refused = kernels()
    usable = [pair for pair in usable if backends is None or pair[1] in backends]
    # The slowest first: what Inductor compiles, and what FlashInfer builds at its first run.
    usable.sort(key=lambda pair: (pair[1] not in ("inductor", "flashinfer"), pair))
    workers = max(1, (os.cpu_count() or 2) - 2)

    def one(pair: tuple[str, str]) -> dict[str, Any]:
        if time.monotonic() - started > seconds:
            error = f"not begun within {seconds} s"
            return {"op": pair[0], "backend": pair[1], "ok": False, "error": error}
        verdict = prove(pair[0], pair[1], device, profile)
        print(pair, verdict["ok"], verdict.get("seconds"), file=sys.stderr, flush=True)
        return verdict

    with ThreadPoolExecutor(workers) as pool:
        verdicts = list(pool.map(one, usable))
    return {
        "benchmark": "proof",
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "profile": profile,
        "seconds": round(time.monotonic() - started, 1),
        "kernels": sorted(verdicts, key=lambda verdict: (verdict["op"], verdict["backend"])),
        "refused": refused,
        "ok": all(verdict["ok"] for verdict in verdicts),
    }


def table(report: dict[str, Any]) -> str:
    """Format the report for people: a line for each kernel and dtype."""
    lines = [
        f"{report['device']}, torch {report['torch']}, profile {report['profile']}, "
        f"{report['seconds']} s"
    ]
    for verdict in report["kernels"]:
        name = f"{verdict['op']:22}{verdict['backend']:12}"
        if "error" in verdict:
            lines.append(f"{name}RED  {verdict['error']}")
        for cell in verdict.get("cells", ()):
            lines.append(
                f"{name}{cell['dtype']:10}{cell['verdict']:12}{cell['executed']:5} examples, "
                f"{sum(cell['refused'].values())} refused, {cell['ratio']:.3f} of the bound  "
                f"{cell['reason'][:200]}"
            )
            lines += [f"    {str(failure)[:1500]}" for failure in cell["failures"][:1]]
    lines += [f"refused: {name}: {why}" for name, why in report["refused"].items()]
    return "\n".join(lines)
