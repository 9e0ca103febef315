"""How our Triton row kernels are best run: candidates side by side with other kernels, on a GPU.

Every candidate's result is checked against the op's float64 oracle and its derived bound, with NaN
in the memory that outputs come from; a wrong one gets no time. Worker processes compile first.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import torch_ops
from benchmarks import _row_cases as cases
from benchmarks._ahead import compile_ahead
from benchmarks._measure import copy_rate, spread
from torch_ops.declarations import catalogue

WORKERS = 14
COMPILE_SECONDS = 100.0
TIME_SECONDS = 120.0
_Measured = dict[str, Any]


def run() -> dict[str, Any]:
    """Compile, check and time; needs one GPU and about four minutes."""
    started = time.monotonic()
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    report["problems"] = _prepare()
    report["compile_seconds"] = round(time.monotonic() - started, 1)
    deadline = time.monotonic() + TIME_SECONDS
    report["copy_tb_s"] = copy_rate(torch.device("cuda"))
    report["host_us"] = _host_cost()
    report["cases"] = [_measure(case, deadline) for case in cases.CASES]
    report["seconds"] = round(time.monotonic() - started, 1)
    report["ok"] = not any(case["wrong"] for case in report["cases"])
    return report


def table(report: dict[str, Any]) -> str:
    """Format a report: for each call the others, our default, and the best candidates."""
    lines = [
        f"{report['gpu']}, torch {report['torch']}, copy {report['copy_tb_s']:.2f} TB/s, "
        f"{report['compile_seconds']} s compiling of {report['seconds']} s",
        "host us a call, rms_norm 1x4096: "
        + ", ".join(f"{name} {us:.2f}" for name, us in report["host_us"].items()),
        *report["problems"],
    ]
    for case in report["cases"]:
        rate = case["bytes"] / 1e6
        shown = {"default": case["default"], **case["peers"]}
        lines.append(
            f"{case['case']}: "
            + "  ".join(f"{n} {us:.2f}us {rate / us:.2f}" for n, us in shown.items() if us)
        )
        ranked = sorted(case["candidates"].items(), key=lambda item: item[1])
        lines += [f"    {us:8.2f}us {rate / us:.2f} TB/s  {name}" for name, us in ranked[:6]]
        if ranked[6:]:
            lines.append(f"    ... {len(ranked)} candidates, worst {ranked[-1][1]:.2f}us")
        lines += [f"    WRONG {text}" for text in case["wrong"]]
        lines += [f"    failed {text}" for text in case["failed"]]
    return "\n".join(lines)


@contextlib.contextmanager
def _patched(op: str, patch: cases.Patch) -> Iterator[None]:
    """Let the backend choose by a candidate, with nothing kept from before or after."""
    module = cases.module_of(op)
    old = {name: getattr(module, name) for name in patch}
    kept = [module._ways if hasattr(module, "_ways") else module._plans, module._launches]
    for table in kept:
        table.clear()
    vars(module).update(patch)
    try:
        yield
    finally:
        vars(module).update(old)
        for table in kept:
            table.clear()


def _prepare() -> list[str]:
    """Compile everything in worker processes; give what failed there."""
    tasks: list[tuple[str, int, str]] = []
    for index, case in enumerate(cases.CASES):
        names = cases.peers(case, cases.arguments(case, torch.device("meta")))
        tasks += [("peer", index, name) for name in names if name != "eager"]
    tasks.sort(key=lambda task: task[2] != "flashinfer")
    seen = set()
    for index, case in enumerate(cases.CASES):
        for label, _ in cases.candidates(case):
            key = (case.op, case.columns, case.dtype, case.options, label)
            if key not in seen:
                seen.add(key)
                tasks.append(("candidate", index, label))
    return compile_ahead(_compile, tasks, WORKERS, COMPILE_SECONDS)


def _compile(task: tuple[str, int, str]) -> None:
    """Run one call once, for the compilers' caches on disk."""
    kind, index, name = task
    case = cases.CASES[index]
    args = cases.arguments(case, torch.device("cuda"))
    if kind == "peer":
        cases.peers(case, args)[name]()
    else:
        with _patched(case.op, dict(cases.candidates(case))[name]):
            cases.kernel_of(case.op)(*args.values())
    torch.cuda.synchronize()
    del args
    torch.cuda.empty_cache()


def _time(call: Callable[[], Any], milliseconds: int) -> float:
    """Give the median time of a call in us."""
    return spread(call, torch.device("cuda"), milliseconds).us


def _measure(case: cases.Case, deadline: float) -> _Measured:
    """Check and time the candidates, the default and the others for one call."""
    args = cases.arguments(case, torch.device("cuda"))
    expected = _expected(case, args)
    found: _Measured = {
        "case": str(case), "bytes": cases.traffic(case), "default": None, "peers": {},
        "candidates": {}, "wrong": [], "failed": [], "ratio": {},
    }  # fmt: skip
    kernel = cases.kernel_of(case.op)
    rep = 80 if found["bytes"] < 3e7 else 40
    ways = [("default", {}), *cases.candidates(case)]
    for label, patch in ways:
        if time.monotonic() > deadline:
            found["failed"].append(f"{label} and what follows: out of time")
            break
        with _patched(case.op, patch):
            try:
                ratio = _check(case, kernel, args, expected)
            except Exception as error:  # a candidate that can't run is a result
                found["failed"].append(f"{label}: {type(error).__name__}: {str(error)[:120]}")
                continue
            found["ratio"][label] = round(ratio, 4)
            if not ratio <= 1:
                found["wrong"].append(f"{label}: error is {ratio:.3g} of its bound")
                continue
            values = tuple(_own(case, args).values())
            us = _time(functools.partial(kernel, *values), rep)
            if label == "default":
                found["default"] = us
            else:
                found["candidates"][label] = us
    for name, call in cases.peers(case, _own(case, args)).items():
        try:
            found["peers"][name] = _time(call, rep)
        except Exception as error:  # another package that can't run here is a result
            found["failed"].append(f"{name}: {type(error).__name__}: {str(error)[:120]}")
    torch._dynamo.reset()
    return found


def _expected(case: cases.Case, args: cases.Arguments) -> tuple[Any, ...]:
    from torch_ops.testing.proof import proof_of

    oracle = proof_of(case.op).oracle
    return oracle({**args, **_defaults(case.op, args)}, catalogue()[case.op].contract)


def _defaults(op: str, args: cases.Arguments) -> cases.Arguments:
    parameters = catalogue()[op].signature.parameters
    return {name: p.default for name, p in parameters.items() if name not in args}


def _own(case: cases.Case, args: cases.Arguments) -> cases.Arguments:
    """Copy what the op writes."""
    mutated = catalogue()[case.op].mutates
    return {name: value.clone() if name in mutated else value for name, value in args.items()}


def _check(
    case: cases.Case,
    kernel: Callable[..., Any],
    args: cases.Arguments,
    expected: tuple[Any, ...],
) -> float:
    """Run on copies and give the largest error as a part of its bound."""
    mutated = catalogue()[case.op].mutates
    own = _own(case, args)
    poison = [torch.full_like(out.value, float("nan"), dtype=out.dtype) for out in expected]
    del poison
    result = kernel(*own.values())
    outputs = tuple(own[name] for name in mutated)
    if not mutated:
        outputs = (result,) if isinstance(result, Tensor) else result
    worst = 0.0
    for got, want in zip(outputs, expected, strict=True):
        if want.bound is None:
            worst = max(worst, 0.0 if torch.equal(got, want.value.to(want.dtype)) else 2.0)
            continue
        error = (got.double() - want.value).abs().nan_to_num(nan=float("inf"))
        worst = max(worst, float((error / want.bound).max()))
    return worst


def _host_cost() -> dict[str, float]:
    """Time calls that the GPU finishes sooner than the host makes them, in us."""
    case = cases.CASES[0]
    args = cases.arguments(case, torch.device("cuda"))
    values = tuple(args.values())
    kernel, op = cases.kernel_of(case.op), torch_ops.ops.rms_norm
    calls: dict[str, Callable[[], Any]] = {
        "direct": lambda: kernel(*values),
        "empty_like": lambda: torch.empty_like(values[0]),
        "through the op": lambda: op(*values, backend="triton"),
        **{n: c for n, c in cases.peers(case, args).items() if n != "inductor"},
    }
    found: dict[str, float] = {}
    for _ in range(5):
        for name, call in calls.items():
            with contextlib.suppress(ImportError):
                found[name] = min(found.get(name, float("inf")), _loop(call))
    return found


def _loop(call: Callable[[], Any], count: int = 1000) -> float:
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    laps = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(count // 5):
            call()
        laps.append((time.perf_counter() - begin) / (count // 5) * 1e6)
        torch.cuda.synchronize()
    return statistics.median(laps)
