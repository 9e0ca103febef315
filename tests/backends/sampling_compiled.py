"""Compile Triton's filters and draws for GPUs that aren't there.

Writes one JSON object: check -> what broke. As in `rows_compiled`, calls on CPU tensors are
recorded instead of launched.
"""

from __future__ import annotations

import torch

from . import workers
from .rows_compiled import SHARED, TARGETS, Launch, compiled, kernel, recorded

COLUMNS = (33, 128256)
KERNELS = {"renormalize", "filter_min_p", "sample"}


def checks() -> list[str]:
    """Name what is compiled: each op for each target, of few columns or of many."""
    return [
        f"{target} {columns}"
        for i, target in enumerate(TARGETS)
        for j, columns in enumerate(COLUMNS)
        if i % 2 == j % 2
    ]


def launches(columns: int) -> list[Launch]:
    """Give what calls of every op launch."""
    probs, numbers = torch.zeros(2, columns), torch.zeros(2)
    k, seed = numbers.int(), numbers.long()
    with recorded() as found:
        kernel("top_k_renorm_probs")(probs, k)
        kernel("top_p_renorm_probs")(probs, numbers)
        kernel("min_p_filter")(probs, numbers)
        kernel("sample_top_k_top_p")(probs, k, numbers, seed, seed)
    return found


def run(check: str) -> None:
    """Compile the kernels for a target; raises where one doesn't make machine code that fits."""
    target, columns = check.split()
    found = launches(int(columns))
    assert {launch.name for launch in found} == KERNELS
    assert len(found) == 4
    for launch in found:
        made = compiled(launch, target)
        binary = "hsaco" if target.startswith("gfx") else "cubin"
        if made.asm[binary][:4] != b"\x7fELF" or made.metadata.shared > SHARED[target]:
            raise AssertionError(f"{launch.name} for {target}: {made.metadata.shared} bytes shared")


if __name__ == "__main__":
    workers.work(checks(), run)
