"""Swapping attention under ``torch.compile``: right at once, replayed from CUDA graphs, cheap.

A stack of attention layers is compiled whole and layer by layer, in the default mode and, on a
GPU, with CUDA graphs; after every swap the output must be the eager one of the new backend.
``native`` is the same stack with one kernel hard-wired.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from torch_ops.attention import Attention, apply_attention_backend_override
from torch_ops.attention import override_attention_backend as override
from torch_ops.attention.cache import Cache
from torch_ops.attention.prepared import Place

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 8, 2, 64
SEQUENCE = ("torch_flash", "torch_math", "inductor", "torch_flash", "inductor", "torch_math")
_calls = {"n": 0}


class _Stack(nn.Module):
    """Attention layers, each on the output of the one before."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for layer in self.layers:
            q = layer(q, k, v) * 0.5 + q
        return q


class _Native(nn.Module):
    """One kernel of PyTorch behind an opaque op, as somebody who never swaps would write it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = torch.ops.torch_ops_swap.native(q, k, v)
        return out


@torch.library.custom_op("torch_ops_swap::native", mutates_args=())
def _native(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = _prepared.run(q, k, v)
    return out


@_native.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(q.shape)


def _layer(device: str, dtype: torch.dtype) -> Attention:
    return Attention(HEADS, HEAD_DIM, KV_HEADS, is_causal=True).to(device, dtype)


def _count_calls() -> None:
    run = Cache.run

    def counted(self: Cache, *args: Any) -> Tensor:
        _calls["n"] += 1
        return run(self, *args)

    Cache.run = counted  # type: ignore[method-assign,assignment]


def _steady(
    calls: Sequence[Callable[[], Any]], synchronize: Callable[[], None]
) -> tuple[float, ...]:
    """Give the medians of microseconds a call, synchronized; the calls take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(60):
        for call, taken in zip(calls, times, strict=True):
            synchronize()
            start = time.perf_counter()
            for _ in range(5):
                call()
            synchronize()
            taken.append((time.perf_counter() - start) / 5 * 1e6)
    return tuple(map(statistics.median, times))


def _one(mode: str, apart: bool, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Compile, swap, compare and time one form."""
    torch._dynamo.reset()
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    q = torch.randn(2, 1, HEADS, HEAD_DIM, device=device, dtype=dtype)
    k, v = (torch.randn(2, 64, KV_HEADS, HEAD_DIM, device=device, dtype=dtype) for _ in "kv")
    ours = _Stack([_layer(device, dtype) for _ in range(LAYERS)])
    native = _Stack([_Native() for _ in range(LAYERS)])
    calls = [_compiled(stack, mode, apart) for stack in (ours, native)]
    for name in SEQUENCE[:3]:
        override(ours, name)
    counters.clear()
    right, graphs, replays, swaps = [], [], [], []
    for name in (*SEQUENCE, "one"):
        start = time.perf_counter()
        if name == "one":
            apply_attention_backend_override(ours.layers[3], "torch_flash")  # type: ignore[arg-type]
        else:
            override(ours, name)
        swaps.append((time.perf_counter() - start) * 1e6)
        expected = ours(q, k, v)
        first = calls[0](q, k, v).clone()
        for _ in range(3):
            last = calls[0](q, k, v).clone()
        before = _calls["n"]
        calls[0](q, k, v)
        replays.append(_calls["n"] - before)
        right.append(bool(torch.allclose(first, expected, atol=2e-2, rtol=2e-2)))
        right.append(bool(torch.equal(first, last)))
        graphs.append(counters["stats"]["unique_graphs"])
    override(ours, "torch_flash")
    for call in calls:
        for _ in range(5):
            call(q, k, v)
    times = _steady([functools.partial(call, q, k, v) for call in calls], synchronize)
    row = {
        "mode": mode,
        "apart": apart,
        "right": all(right),
        "graphs": graphs,
        "kernel_body_runs": replays,
        "swap_us": [round(value, 1) for value in swaps],
        "us": round(times[0], 1),
        "native_us": round(times[1], 1),
        "ratio": round(times[0] / times[1], 3),
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def _compiled(stack: _Stack, mode: str, apart: bool) -> Callable[..., Tensor]:
    if not apart:
        whole: Callable[..., Tensor] = torch.compile(stack, mode=mode, fullgraph=True)
        return whole
    layers = [torch.compile(layer, mode=mode, fullgraph=True) for layer in stack.layers]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        for layer in layers:
            q = layer(q, k, v) * 0.5 + q
        return q

    return call


def _prepared_swaps(device: str, dtype: torch.dtype) -> float:
    """Give the median of microseconds that an override of prepared layers takes on the host."""
    stack = _Stack([_layer(device, dtype) for _ in range(LAYERS)])
    times = []
    for name in ("torch_math", "torch_flash") * 200:
        start = time.perf_counter()
        override(stack, name)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: which forms."""
    parser.add_argument("--mode", choices=("default", "reduce-overhead"), help="this one alone")
    parser.add_argument(
        "--apart", action=argparse.BooleanOptionalAction, help="layers compiled apart, or whole"
    )


def run(mode: str | None = None, apart: bool | None = None) -> dict[str, Any]:
    """Measure the forms that are asked for, of those that this machine can run."""
    global _prepared
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = _layer(device, dtype)
    apply_attention_backend_override(layer, "torch_flash")
    place = Place(layer._anchored()[0], dtype)
    found = layer._cache.get(layer.backend, place)
    assert found is not None
    _prepared = found
    _count_calls()
    modes = ["reduce-overhead", "default"] if device == "cuda" else ["default"]
    if mode is not None and mode not in modes:
        raise ValueError(f"--mode: {mode!r} (accepted on a CPU: {modes})")
    forms = itertools.product(
        modes if mode is None else [mode], (False, True) if apart is None else (apart,)
    )
    with torch.no_grad():
        rows = [_one(*form, device, dtype) for form in forms]
    return {
        "benchmark": "attention_swap",
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "layers": LAYERS,
        "override_us": round(_prepared_swaps(device, dtype), 1),
        "rows": rows,
        "ok": all(row["right"] for row in rows),
    }


def table(report: dict[str, Any]) -> str:
    """Format the report for people."""
    lines = [
        f"{report['layers']} layers on {report['device']}, torch {report['torch']}",
        f"override of prepared layers, us of host time: {report['override_us']}",
    ]
    for row in report["rows"]:
        form = "layer by layer" if row["apart"] else "whole"
        lines.append(
            f"{row['mode']:16}{form:15} right {row['right']}  us {row['us']} "
            f"(native {row['native_us']}, ratio {row['ratio']})"
        )
        lines.append(f"    graphs {row['graphs']}  kernel bodies run {row['kernel_body_runs']}")
        lines.append(f"    override, us of host time {row['swap_us']}")
    return "\n".join(lines)


_prepared: Any = None
