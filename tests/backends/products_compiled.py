"""Compile Triton's products of quantized matrices, for GPUs that aren't there.

Writes one JSON object: check -> what broke. As in `ragged_compiled`, calls on CPU tensors are
recorded instead of launched; tile sizes are chosen as on the target.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from . import workers
from .attention_compiled import compiled_gluon
from .rows_compiled import BACKEND, SHARED, TARGETS, Launch, compiled, recorded

FLOAT8 = {
    "sm_90": torch.float8_e4m3fn, "sm_100": torch.float8_e4m3fn, "gfx950": torch.float8_e4m3fn,
    "gfx942": torch.float8_e4m3fnuz,
}  # fmt: skip
OUT = (torch.bfloat16, torch.float16, torch.float32)
LARGE = "sm_90 fp8 2560"  # rows of a matrix whose product on Hopper a kernel of its own makes
# Lengths of rows by their number: whole steps, whole vectors, neither; one more is scaled by group.
ROWS = {1: (512,), 33: (301,), 300: (512,), 4096: (520,)}


def checks() -> list[str]:
    """Name what is compiled: each number of rows for each target, of int8 or of float8."""
    return [LARGE] + [
        f"{target} {kind} {rows}"
        for place, target in enumerate(TARGETS)
        for kind in ("int8", "fp8")
        for i, rows in enumerate(ROWS)
        if (kind == "int8" or target in FLOAT8) and (kind == "int8") is (i % 2 == place % 2)
        if i < 2 or place % 2
    ]


def large(dtype: torch.dtype) -> list[Launch]:
    """Give what large products launch on Hopper: with a scale for all or for each row."""
    module: Any = importlib.import_module(f"{BACKEND}._scaled_mm")
    hopper: Any = importlib.import_module(f"{BACKEND}._scaled_mm_hopper")
    kept, hopper.gluon_runs = hopper.gluon_runs, lambda _: True
    module._launches.clear()
    a, b = (torch.zeros(1, 512).to(dtype).expand(n, 512).contiguous() for n in (2560, 1288))
    try:
        with recorded() as found:
            rows, columns = torch.ones(2560, 1), torch.ones(1, 1288)
            module.multiply(a, b.t(), rows, columns, OUT[0], torch.zeros(1288, dtype=OUT[0]))
            module.multiply(a, b.t(), rows[0], columns[0, 0], OUT[2], None)
    finally:
        hopper.gluon_runs = kept
        module._launches.clear()
        hopper._variant.cache_clear()
    return found


def launches(target: str, kind: str, rows: int) -> list[Launch]:
    """Give what calls launch on a target: aligned or not, scaled by row or by group."""
    dtype = torch.int8 if kind == "int8" else FLOAT8[target]
    module: Any = importlib.import_module(f"{BACKEND}._scaled_mm")
    kept, out = module.arch_of, OUT[rows % len(OUT)]
    module.arch_of = lambda _: target
    module._launches.clear()
    try:
        with recorded() as found:
            for width in ROWS[rows]:
                a, b = (torch.zeros(n, width).to(dtype) for n in (rows, 640))
                left, right = torch.ones(rows, 1), torch.ones(1, 640)
                module.multiply(a, b.t(), left, right, out, torch.zeros(640, dtype=out))
            _grouped(module, rows, dtype, out)
    finally:
        module.arch_of = kept
        module._launches.clear()
    return found


def _grouped(module: Any, rows: int, dtype: torch.dtype, out: torch.dtype) -> None:
    a, b = (torch.zeros(n, 512).to(dtype) for n in (rows, 576))
    module.multiply(a, b.t(), torch.ones(rows, 4), torch.ones(4, 5), out, None)


def run(check: str) -> None:
    """Compile a call's kernels for a target; raises where they make no machine code that fits."""
    target, kind, rows = check.split()
    if check == LARGE:
        found = large(FLOAT8[target])
        if [launch.name for launch in found] != ["_multiply_large"] * 2:
            raise AssertionError(f"{check}: {[launch.name for launch in found]}")
    else:
        found = launches(target, kind, int(rows))
        if len(found) != len(ROWS[int(rows)]) + 1:
            raise AssertionError(f"{check}: {len(found)} launches")
    for launch in found:
        made = compiled_gluon(launch) if check == LARGE else compiled(launch, target)
        if made.asm["hsaco" if target.startswith("gfx") else "cubin"][:4] != b"\x7fELF":
            raise AssertionError(f"{check}: no machine code")
        if made.metadata.shared > SHARED[target]:
            text = f"{made.metadata.shared} bytes of shared memory (at most {SHARED[target]})"
            raise AssertionError(f"{check}: {text}")


if __name__ == "__main__":
    workers.work(checks(), run)
