"""Compile Triton's ops of experts for absent GPUs; one JSON object: check -> what broke."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from . import workers
from .rows_compiled import BACKEND, SHARED, TARGETS, Launch, compiled, kernel, recorded

KERNELS = {
    "_route": ("bfloat16", "float64"),
    "_count": ("int32",),
    "_place": ("int32",),
    "_gate_up": ("bfloat16",),
    "_down": ("bfloat16", "float32"),
}


def launches(target: str, name: str, dtype: str) -> list[Launch]:
    """Give what a kernel's op launches on a target in a dtype."""
    kind = getattr(torch, dtype)
    with recorded() as found:
        if name == "_route":
            kernel("topk_softmax")(torch.zeros(9, 128, dtype=kind), 8, True)
            if kind == torch.bfloat16:
                kernel("topk_softmax")(torch.zeros(9, 120, dtype=kind)[:, ::2], 5)
        if name in ("_count", "_place"):
            for tokens in (8, 4096):
                kernel("moe_align_block_size")(torch.zeros(tokens, 8).int(), 120, 64)
        if name in ("_gate_up", "_down"):
            _experts(target, kind)
    return found


def _experts(target: str, kind: torch.dtype) -> None:
    """Many tokens of an expert, and few of sizes and strides that no 16 bytes divide."""
    experts: Any = importlib.import_module(f"{BACKEND}._experts")
    experts.arch_of = lambda _: target  # a process of its own compiles, one target after another
    for tokens, hidden, width in ((2048, 256, 192), (5, 35, 17)):
        x, ids = torch.zeros(tokens, hidden, dtype=kind), torch.zeros(tokens, 2).int()
        gate_up = torch.zeros(3, 2 * width, hidden, dtype=kind)
        down = torch.zeros(3, hidden, width, dtype=kind)
        kernel("fused_experts")(x, gate_up, down, torch.zeros(tokens, 2), ids)


def checks() -> list[str]:
    """Name what is compiled: each kernel and dtype for a target of NVIDIA's and one of AMD's."""
    return [
        f"{target} {name} {dtype}"
        for i, target in enumerate(TARGETS)
        for k, name in enumerate(KERNELS)
        for j, dtype in enumerate(KERNELS[name])
        if (i + j + k) % (2 if target.startswith("gfx") else 3) == 0
    ]


def run(check: str) -> None:
    """Compile a kernel's launches for a target; raises where one doesn't make machine code."""
    target, name, dtype = check.split()
    binary = "cubin" if TARGETS[target][0] == "cuda" else "hsaco"
    found = [launch for launch in launches(target, name, dtype) if launch.name == name]
    assert found, "never launched"
    for launch in found:
        made = compiled(launch, target)
        assert made.asm[binary][:4] == b"\x7fELF"
        assert made.metadata.shared <= SHARED[target], made.metadata.shared


if __name__ == "__main__":
    workers.work(checks(), run)
