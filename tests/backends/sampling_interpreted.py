"""Run Triton's filters and draws in its interpreter; one JSON object: check -> what broke.

Masses are whole numbers, so that every bit is that of the reference.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor

from . import workers
from .rows_compiled import BACKEND

OPS = ("min_p_filter", "sample_top_k_top_p", "top_k_renorm_probs", "top_p_renorm_probs")
# columns, and those of a step: of rows of several steps, and of lanes of 1 and of 4
SIZES = {"one": (1, 8), "odd": (33, 16), "whole": (20, 32)}
LAYOUTS = ("contiguous", "padded", "transposed")
K = (-1, 0, 1, 2, 5, 17, 32, 10**9)
P = (-0.5, 0.0, 1e-9, 0.3, 0.9, 0.999999, 1.0, math.nan)


def checks() -> list[str]:
    """Name everything that is checked."""
    return [
        f"{op}: {size}: {LAYOUTS[(i + j) % len(LAYOUTS)]}"
        for i, op in enumerate(OPS)
        for j, size in enumerate(SIZES)
    ]


def rows(columns: int) -> Tensor:
    """Rows of all kinds: random, ties, all alike, none, NaN, infinite, tiny, a tail, negative."""
    torch.manual_seed(columns)
    probs = (torch.randn(9, columns) * 3).softmax(-1)
    probs[1] = torch.randint(0, 3, (columns,)) / columns
    probs[2] = 1 / columns
    probs[3] = 0
    probs[4, columns // 2] = math.nan
    probs[5, -1] = -math.inf
    probs[6] *= 1e-40
    probs[7, 1:] = 1e-9
    probs[8, ::2] *= -1
    return probs


def laid(probs: Tensor, layout: str) -> Tensor:
    """The same rows, elsewhere in memory; what is between them is NaN."""
    if layout == "contiguous":
        return probs
    if layout == "transposed":
        return probs.t().contiguous().t()
    wide = torch.full((len(probs), probs.shape[1] + 5), math.nan)
    wide[:, 3:-2] = probs
    return wide[:, 3:-2]


def run(check: str) -> None:
    """Compare every bit with the reference."""
    op, size, layout = check.split(": ")
    columns, step = SIZES[size]
    module: Any = importlib.import_module(f"{BACKEND}._sampling")
    module.tile = lambda _: (step, 32)
    module._launches.clear()
    module._variants.clear()
    probs = laid(rows(columns), layout)
    for first in (0, 5):
        same(op, probs, first)


def same(op: str, probs: Tensor, first: int) -> None:
    """Compare one call, in which rows have numbers of all kinds."""
    import torch_ops

    order = [(first + i) % len(K) for i in range(len(probs))]
    numbers = {
        "k": torch.tensor([K[i] for i in order]).int(),
        "p": torch.tensor([P[(i * 3 + first) % len(P)] for i in order]),
        "min_p": torch.tensor([P[i] for i in order]),
        "seed": torch.tensor([2**62 + 7 * i for i in order]) * (-1) ** first,
        "offset": torch.arange(len(probs)) * 3**35 + first,
    }
    call: Any = getattr(torch_ops.ops, op)
    names = list(call.declaration.signature.parameters)[1:]
    args = (probs, *(numbers[name].to(probs.device) for name in names))
    got, want = (call(*args, backend=backend) for backend in ("triton", "torch"))
    wrong = ~((got == want) | (got.isnan() & want.isnan()))
    if wrong.any() or got.dtype != want.dtype or not got.is_contiguous():
        raise AssertionError(f"{op}, numbers from {first}: {wrong.nonzero().tolist()[:5]}")


if __name__ == "__main__":
    workers.work(checks(), run)
