"""Compile what Triton's ragged and paged attention launches, for GPUs that aren't there.

Writes one JSON object: check -> what broke. As in `attention_compiled`, calls on CPU tensors are
recorded instead of launched; tile sizes are chosen as on the target.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from . import latents, workers
from .rows_compiled import BACKEND, TARGETS, Launch, compiled, recorded

DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
OPS = ("paged_decode", "paged_prefill", "varlen_attention_with_lse")


class Call(NamedTuple):
    """What varies between calls beside target, op, dtype and head_dim."""

    page: int
    group: int
    queries: int
    window_left: int
    logits_soft_cap: float
    is_causal: bool
    unaligned: bool = False


CALLS = (
    Call(16, 4, 300, -1, 0.0, True),
    Call(1, 1, 9, 40, 0.0, True),
    Call(64, 8, 300, -1, 30.0, False),
    Call(128, 16, 3, 40, 30.0, True),
    Call(5, 7, 300, -1, 0.0, True, unaligned=True),
    Call(16, 2, 20, -1, 0.0, False),
    Call(32, 71, 40, 7, 0.0, True),
)


def checks(*, every: bool = False) -> list[str]:
    """Name what is compiled: each op for each target, each head_dim for half of them, or all."""
    return [
        f"{target} {op} {dtype} {head_dim} {(i + 2 * j + 3 * k + n) % len(CALLS)}"
        for i, target in enumerate(TARGETS)
        for j, head_dim in enumerate(HEAD_DIMS)
        for k, op in enumerate(OPS)
        for n, dtype in enumerate(DTYPES)
        if every
        or ((i + j) % 2 == 0 and (i + j) % len(OPS) == k and (i // 2 + j // 2) % len(DTYPES) == n)
    ] + [*latents.COMPILED]


def run(check: str) -> None:
    """Compile a call's kernels for a target; raises where they make no machine code that fits."""
    target, op, dtype, *numbers = check.split()
    if op == latents.OP:
        with chosen_for(target):
            found = latents.launches(check)
    else:
        head_dim, number = map(int, numbers)
        found = launches(target, op, getattr(torch, dtype), head_dim, CALLS[number])
    for launch in found:
        made = compiled(launch, target)
        if made.asm["hsaco" if target.startswith("gfx") else "cubin"][:4] != b"\x7fELF":
            raise AssertionError(f"{check}: no machine code of {launch.name}")
        limit = importlib.import_module(f"{BACKEND}._attention").shared_memory(target)
        if made.metadata.shared > limit:
            text = f"{made.metadata.shared} bytes of shared memory of {limit}"
            raise AssertionError(f"{check}: {launch.name}: {text}")
        if op == latents.OP:
            latents.judge(check, launch.name, made)


def launches(
    target: str, op: str, dtype: torch.dtype, head_dim: int, call: Call, batch: int = 3
) -> list[Launch]:
    """Give what a call launches on a target: a table of 2000 pages, or as many packed keys."""
    q = torch.zeros(batch * call.queries, 2 * call.group, head_dim, dtype=dtype)
    shape = (9, call.page, 2, head_dim) if op.startswith("paged") else (2000, 2, head_dim)
    flat = torch.zeros(9 * call.page * 2 * head_dim + 2000 * 2 * head_dim + 1, dtype=dtype)
    keys = flat[call.unaligned :][: torch.Size(shape).numel()].view(shape)
    bounds, indices = torch.zeros(batch + 1, dtype=torch.int32), torch.zeros(2000).int()
    numbers: tuple[Any, ...] = (None, call.window_left, call.logits_soft_cap)
    function = getattr(importlib.import_module(f"{BACKEND}.{op}"), op)
    with chosen_for(target), recorded() as found:
        if op == "paged_decode":
            function(q[:batch], keys, keys.clone(), bounds, indices, bounds[1:], *numbers)
        elif op == "paged_prefill":
            table = (bounds, bounds, indices, bounds[1:])
            function(q, keys, keys.clone(), *table, call.is_causal, *numbers)
        else:
            lengths = (call.queries, 700)
            function(q, keys, keys.clone(), bounds, bounds, *lengths, call.is_causal, *numbers)
    return found


@contextlib.contextmanager
def chosen_for(target: str) -> Iterator[None]:
    """Choose tile sizes as on a target, of 132 multiprocessors."""
    decode: Any = importlib.import_module(f"{BACKEND}._paged_decode")
    ragged: Any = importlib.import_module(f"{BACKEND}._ragged")
    mla: Any = importlib.import_module(f"{BACKEND}._mla_decode")
    kept = decode.config, mla.config, ragged.config, torch.version.hip
    multiprocessors = decode.multiprocessors
    decode.config = lambda _, *rest: kept[0](target, *rest)
    mla.config = lambda _, *rest: kept[1](target, *rest)
    decode.multiprocessors = mla.multiprocessors = lambda _: 132
    ragged.config = lambda _, *rest: kept[2](target, *rest)
    torch.version.hip = "6" if target.startswith("gfx") else None
    _forget(decode, mla, ragged)
    try:
        yield
    finally:
        decode.config, mla.config, ragged.config, torch.version.hip = kept
        decode.multiprocessors = mla.multiprocessors = multiprocessors
        _forget(decode, mla, ragged)


def _forget(decode: Any, mla: Any, ragged: Any) -> None:
    plans = decode._plan, decode._variants, mla._plan, mla._variants, ragged._plan, ragged._variant
    for cached in plans:
        cached.cache_clear()


if __name__ == "__main__":
    workers.work(checks(every="--every" in sys.argv), run)
