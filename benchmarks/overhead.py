"""Eager cost of a call over its kernel, beside define + impl and plain ``custom_op``.

All contenders run the same kernel and the same argument checks in one process, in turns; the
minimum over the rounds counts. What is compared is the time over the bare function. Then comes the
guard by which a compiled frame sees a changed policy: its time over the same frame's without it.
Last, what an open trace adds to a call: eager, and in compiled frames whose calls run, dissolve or
are replayed.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.library import custom_op

import torch_ops
from benchmarks import _plain
from benchmarks._measure import least
from torch_ops import dynamo, kernels, policy

ROUNDS, CALLS, SHORT = 60, 100, 10
# Limits of (ours - bare) / (contender - bare), by op, mode and contender.
LIMITS = {
    ("rms_norm", "grad"): {"define_impl": 1.3, "custom_op": 0.4},
    ("rms_norm", "inference"): {"define_impl": 1.3, "custom_op": 0.7},
    ("fused_add_rms_norm_", "grad"): {"custom_op": 0.35},
    ("fused_add_rms_norm_", "inference"): {"custom_op": 0.6},
}
GUARD_LIMIT_US = 3.0  # a frame
FRAME = 8  # calls in a frame
TRACE_LIMIT_US = 1.0  # a call
LOOP, LOOP_US = 100_000, 2000.0  # of a machine that the limits in us are for


def _contenders(op: str, args: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    declaration = torch_ops.declarations.catalogue()[op]
    kernel = torch_ops.get_kernel(op, "torch")
    check = declaration.check_call

    def bare(*call: Any) -> Any:
        check(*call)
        return kernel(*call)

    define_op = _plain.define(f"{op}_define", declaration, bare)
    custom_op(
        f"{_plain.NAMESPACE}::{op}_custom",
        bare,
        mutates_args=declaration.mutates,
        schema=declaration.schema,
    )
    custom = getattr(getattr(torch.ops, _plain.NAMESPACE), f"{op}_custom")
    ours = getattr(torch.ops.torch_ops, op)
    return {
        "bare": lambda: bare(*args),
        "define_impl": lambda: define_op(*args),
        "custom_op": lambda: custom(*args),
        "ours": lambda: ours(*args),
    }


def _guard(x: Tensor, weight: Tensor) -> float:
    """Give the microseconds that the policy's guard adds to a call of a compiled frame."""

    def chain(x: Tensor) -> Tensor:
        for _ in range(FRAME):
            x = torch.ops.torch_ops.rms_norm(x, weight, 1e-6)
        return x

    def apart(x: Tensor) -> Tensor:  # compiled code belongs to a code object: one for each
        return chain(x)

    guarded = torch.compile(chain, backend="eager", fullgraph=True)
    free = torch.compile(apart, backend="eager", fullgraph=True)
    with torch.inference_mode():
        guarded(x)
        with mock.patch.object(dynamo, "_install", return_value=None):
            free(x)
        calls = {"guarded": lambda: guarded(x), "free": lambda: free(x)}
        times = least(calls, 3 * ROUNDS, CALLS // FRAME, x.device)
    return times["guarded"] - times["free"]


def _replaying(graph: Any, inputs: Any) -> Callable[..., Any]:
    """Stand for a backend whose graphs run no Python: give what the first run gave."""
    kept: list[Any] = []

    def call(*args: Any) -> Any:
        if not kept:
            kept.append(graph(*args))
        return kept[0]

    return call


def _traced(x: Tensor, weight: Tensor) -> dict[str, float]:
    """Give the microseconds that an open trace adds to a call, by the way it goes.

    The kernel does nothing: its time would hide what is measured.
    """

    def chain(x: Tensor) -> Tensor:
        for _ in range(FRAME):
            x = torch.ops.torch_ops.rms_norm(x, weight, 1e-6)
        return x

    def inlined(x: Tensor) -> Tensor:
        return chain(x)

    def kept(x: Tensor) -> Tensor:
        return chain(x)

    def replayed(x: Tensor) -> Tensor:
        return chain(x)

    added = {}
    with torch.inference_mode(), mock.patch.object(dynamo, "may_replay", return_value=True):
        dissolved = torch.compile(inlined, backend=_replaying)
        added["inlined"] = _added(lambda: dissolved(x)) / FRAME
        undo = torch_ops.set_inline(False)
        recorded = torch.compile(replayed, backend=_replaying)
        added["replayed"] = _added(lambda: recorded(x)) / FRAME
        kernel = kernels.load(torch_ops.select_kernel("rms_norm", "torch"))
        with mock.patch.object(kernel, "function", lambda x, *_: x):
            called = torch.compile(kept, backend="eager")
            added["called in a frame"] = _added(lambda: called(x)) / FRAME
            added["eager"] = _added(lambda: torch.ops.torch_ops.rms_norm(x, weight, 1e-6))
        undo()
    return added


def _added(call: Callable[[], Any]) -> float:
    """Give the microseconds that an open trace adds: bursts without and with one, in turns."""

    def burst() -> float:
        for _ in range(5):  # plans are made anew for a trace, and after it
            call()
        start = time.perf_counter()
        for _ in range(SHORT):
            call()
        return (time.perf_counter() - start) / SHORT * 1e6

    policy.invalidate()  # plans hold kernels
    free = traced = float("inf")
    for _ in range(3 * ROUNDS):
        free = min(free, burst())
        with torch_ops.trace():
            traced = min(traced, burst())
    return traced - free


def _slowness() -> float:
    """Give how many times as long as there a loop of Python takes here, at least once."""

    def loop() -> int:
        total = 0
        for _ in range(LOOP):
            total += 1
        return total

    took = least({"loop": loop}, ROUNDS, 1, torch.device("cpu"))["loop"]
    return max(took / LOOP_US, 1.0)


def run() -> dict[str, Any]:
    """Measure every op and mode of `LIMITS`, the guard, and a trace."""
    torch.set_num_threads(1)
    x, weight = torch.randn(1, 8), torch.randn(8)
    calls: dict[str, tuple[Any, ...]] = {
        "rms_norm": (x, weight, 1e-6),
        "fused_add_rms_norm_": (x.clone(), x.clone(), weight, 1e-6),
    }
    modes = {"grad": torch.enable_grad, "inference": torch.inference_mode}
    rows = []
    for op, args in calls.items():
        contenders = _contenders(op, args)
        for mode, context in modes.items():
            with context():
                times = least(contenders, ROUNDS, CALLS, x.device)
            over = {name: t - times["bare"] for name, t in times.items()}
            limits = LIMITS[op, mode]
            ratios = {name: over["ours"] / over[name] for name in ("define_impl", "custom_op")}
            ok = all(ratios[name] <= limit for name, limit in limits.items())
            rows.append(
                {"op": op, "mode": mode, "us": times, "ratios": ratios, "limits": limits, "ok": ok}
            )
    guard_us = _guard(x, weight)
    trace_us = {way: round(us, 3) for way, us in _traced(x, weight).items()}
    slowness = _slowness()
    return {
        "benchmark": "overhead",
        "torch": torch.__version__,
        "machine": platform.machine(),
        "rows": rows,
        "guard_us": round(guard_us, 3),
        "trace_us": trace_us,
        "slowness": round(slowness, 2),
        "ok": all(row["ok"] for row in rows)
        and guard_us <= GUARD_LIMIT_US * slowness
        and max(trace_us.values()) <= TRACE_LIMIT_US * slowness,
    }


def table(report: dict[str, Any]) -> str:
    """Format the report for people."""
    head = ("op", "mode", "bare us", "define+impl", "custom_op", "ours", "/define", "/custom_op")
    lines = [f"Eager cost, torch {report['torch']}, minimum of {ROUNDS} rounds"]
    lines.append("{:22}{:11}{:>9}{:>13}{:>11}{:>8}{:>9}{:>12}".format(*head))
    for row in report["rows"]:
        us, ratios = row["us"], row["ratios"]
        limits = ", ".join(f"{name} {limit}" for name, limit in row["limits"].items())
        lines.append(
            f"{row['op']:22}{row['mode']:11}{us['bare']:9.2f}{us['define_impl']:13.2f}"
            f"{us['custom_op']:11.2f}{us['ours']:8.2f}{ratios['define_impl']:9.2f}"
            f"{ratios['custom_op']:12.2f}  {'ok' if row['ok'] else 'OVER'} (at most {limits})"
        )
    slow = f", times {report['slowness']} here" if report["slowness"] > 1 else ""
    limit = f"at most {GUARD_LIMIT_US}{slow}"
    lines.append(f"guard: {report['guard_us']} us a compiled frame ({limit})")
    ways = ", ".join(f"{way} {us}" for way, us in report["trace_us"].items())
    lines.append(f"an open trace: us a call: {ways} (at most {TRACE_LIMIT_US}{slow})")
    return "\n".join(lines)
