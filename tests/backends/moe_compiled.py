"""Compile Triton's ops of experts for absent GPUs; one JSON object: check -> what broke."""

from __future__ import annotations

import torch

from . import workers
from .rows_compiled import SHARED, TARGETS, Launch, compiled, kernel, recorded

KERNELS = {"_route": ("bfloat16", "float64")}


def launches(name: str, dtype: str) -> list[Launch]:
    """Give what a kernel's op launches in a dtype."""
    kind = getattr(torch, dtype)
    with recorded() as found:
        if name == "_route":
            kernel("topk_softmax")(torch.zeros(9, 128, dtype=kind), 8, True)
            if kind == torch.bfloat16:
                kernel("topk_softmax")(torch.zeros(9, 120, dtype=kind)[:, ::2], 5)
    return found


def checks() -> list[str]:
    """Name everything that is compiled."""
    return [f"{t} {name} {dtype}" for t in TARGETS for name in KERNELS for dtype in KERNELS[name]]


def run(check: str) -> None:
    """Compile a kernel's launches for a target; raises where one doesn't make machine code."""
    target, name, dtype = check.split()
    binary = "cubin" if TARGETS[target][0] == "cuda" else "hsaco"
    found = [launch for launch in launches(name, dtype) if launch.name == name]
    assert found, "never launched"
    for launch in found:
        made = compiled(launch, target)
        assert made.asm[binary][:4] == b"\x7fELF"
        assert made.metadata.shared <= SHARED[target], made.metadata.shared


if __name__ == "__main__":
    workers.work(checks(), run)
