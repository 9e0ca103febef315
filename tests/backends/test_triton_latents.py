"""Triton's attention to latents: what it launches, and runs on a GPU; the rest is in `latents`."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops

from . import ragged_compiled
from .rows_compiled import BACKEND, recorded

pytest.importorskip("triton", reason="triton is not installed")
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"
)


def _module(name: str) -> Any:
    return importlib.import_module(f"{BACKEND}.{name}")


def test_the_page_table_has_one_plan_however_long_it_is() -> None:
    with ragged_compiled.chosen_for("sm_90"):
        plan = _module("_mla_decode")._plan
        q, pool = torch.zeros(4, 128, 576).half(), torch.zeros(9, 64, 576).half()
        bounds = torch.zeros(5, dtype=torch.int32)
        with recorded() as found:
            for listed, pages in ((1, 9), (40, 5), (4000, 9)):
                parts = (q[..., :512], q[..., 512:], pool[:pages, :, :512], pool[:pages, :, 512:])
                table = (bounds, torch.zeros(listed).int(), bounds[1:])
                _module("mla_decode").mla_decode(*parts, *table, 0.1)
        assert plan.cache_info().misses == 1
    assert [each.name for each in found] == ["decode_latents"] + ["decode_latents", "unite"] * 2


@pytest.mark.parametrize(
    ("arch", "itemsize", "heads", "lane", "expected"),
    [
        ("sm_90", 2, 128, 8, (64, 32, 8, 3, 1, 4)),
        ("sm_90", 2, 16, 8, (16, 32, 4, 3, 2, 4)),
        ("sm_90", 2, 128, 1, (32, 32, 8, 3, 1, 4)),
        ("sm_80", 2, 128, 8, (32, 32, 8, 3, 1, 4)),
        ("sm_86", 2, 128, 8, (16, 32, 4, 3, 1, 4)),
        ("gfx942", 2, 128, 8, (32, 32, 4, 1, 2, 4)),
        ("sm_90", 4, 128, 4, (16, 16, 4, 1, 2, 8)),
    ],
)
def test_tiles(arch: str, itemsize: int, heads: int, lane: int, expected: tuple[int, ...]) -> None:
    assert tuple(_module("_mla_decode").config(arch, itemsize, heads, 576, lane)) == expected


def _args(lengths: tuple[int, ...], heads: int, pages: int = 60) -> list[Tensor]:
    """Make a call of one cache, of 64 tokens a page, that is NaN where no sequence reads."""
    torch.manual_seed(1)
    counts = [-(-n // 64) for n in lengths]
    pool = torch.full((pages, 64, 576), math.nan, dtype=torch.bfloat16, device="cuda")
    ids = torch.randperm(pages)[: sum(counts)].int().cuda()
    pool[ids.long()] = torch.randn(len(ids), 64, 576, device="cuda").bfloat16()
    bounds = torch.tensor([0, *counts]).cumsum(0).int().cuda()
    last = torch.tensor([n - max(c - 1, 0) * 64 for n, c in zip(lengths, counts, strict=True)])
    for end, used, count in zip(bounds[1:].tolist(), last.tolist(), counts, strict=True):
        if count:
            pool[int(ids[end - 1]), used:] = math.nan
    q = torch.randn(len(lengths), heads, 576, device="cuda").bfloat16()
    parts = [q[..., :512], q[..., 512:], pool[..., :512], pool[..., 512:]]
    return [*parts, bounds, ids, last.int().cuda()]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("heads", [1, 16, 40, 128])
def test_one_long_sequence_among_short_ones(heads: int) -> None:
    args = _args((2700, 0, 33, 64, 1), heads)
    got = torch_ops.ops.mla_decode(*args, 0.07, backend="triton")
    wanted = torch_ops.ops.mla_decode(*args, 0.07, backend="torch")
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)
    apart = [*(t.contiguous() for t in args[:4]), *args[4:]]
    assert torch.equal(got, torch_ops.ops.mla_decode(*apart, 0.07, backend="triton"))


@pytest.mark.gpu
@needs_gpu
def test_replayed_from_a_graph_with_other_lengths() -> None:
    """The launch is the same for all lengths: a graph reads them from the table."""
    args = _args((1500, 700, 33), 128)
    args[2].nan_to_num_()
    args[3].nan_to_num_()
    run = torch_ops.get_kernel("mla_decode", "triton")
    run(*args, 0.07)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*args, 0.07)
    for lengths in ((1500, 700, 33), (16, 700, 33), (1490, 1, 32)):
        counts = [-(-n // 64) for n in lengths]
        args[4].copy_(torch.tensor([0, *counts]).cumsum(0))
        args[6].copy_(
            torch.tensor([n - (c - 1) * 64 for n, c in zip(lengths, counts, strict=True)])
        )
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, run(*args, 0.07))
        wanted = torch_ops.ops.mla_decode(*args, 0.07, backend="torch")
        torch.testing.assert_close(out, wanted, atol=2e-2, rtol=2e-2)
