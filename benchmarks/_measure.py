"""What benchmarks share: medians of a call, the copy rate, a limit of time, facts of a machine."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

_A = TypeVar("_A")
_T = TypeVar("_T")

PACKAGES = ("torch", "triton", "flashinfer-python", "sglang-kernel", "transformers")
_GPU_COPY, _CPU_COPY = 1 << 29, 1 << 26  # bytes; far more than the caches hold


class Spread(NamedTuple):
    """Times of a call in us: the median, and where the middle of them begins and ends."""

    us: float
    low: float
    high: float


class OutOfTimeError(BaseException):
    """The time of `limited` is over. No Exception: a candidate that fails is caught as one."""


def device_here() -> torch.device:
    """Give the GPU of this machine, else its CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def spread(call: Callable[[], Any], device: torch.device, milliseconds: int = 100) -> Spread:
    """Time a call, on a GPU with a cold L2 cache.

    Returns:
        Median, and the 20th and 80th percentile on a GPU, or the quartiles on a CPU.
    """
    if device.type == "cuda":
        from triton.testing import do_bench

        found = do_bench(
            call, warmup=milliseconds // 5, rep=milliseconds, quantiles=[0.5, 0.2, 0.8]
        )
        return Spread(*(1000 * ms for ms in found))
    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    times = timer.blocked_autorange(min_run_time=milliseconds / 1000)
    return Spread(times.median * 1e6, times._p25 * 1e6, times._p75 * 1e6)


def least(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, calls: int, device: torch.device
) -> dict[str, float]:
    """Give the host's microseconds for a call: the least over rounds of short bursts, in turns.

    A GPU is idle when a burst begins; what the burst leaves there is waited for after its time.
    """
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / calls * 1e6)
            if device.type == "cuda":
                torch.cuda.synchronize()
    return best


def timed(call: Callable[[], _T], device: torch.device) -> tuple[float, _T]:
    """Give the milliseconds of a call, with what it leaves to the GPU, and its result."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else _nothing
    synchronize()
    start = time.perf_counter()
    result = call()
    synchronize()
    return (time.perf_counter() - start) * 1e3, result


def _nothing() -> None:
    """There is nothing to wait for."""


def steps_ms(
    step: Callable[[_A], _T], inputs: Sequence[_A], device: torch.device
) -> tuple[list[float], _T]:
    """Give the milliseconds of each step, one queued behind the other, and the last result.

    On a GPU they are from one step's end to the next one's: nobody waits for the host in between,
    unless the step does.
    """
    if device.type != "cuda":
        pairs = [timed(functools.partial(step, each), device) for each in inputs]
        return [ms for ms, _ in pairs], pairs[-1][1]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(inputs) + 1)]
    events[0].record()
    for event, each in zip(events[1:], inputs, strict=True):
        result = step(each)
        event.record()
    torch.cuda.synchronize()
    return [one.elapsed_time(other) for one, other in itertools.pairwise(events)], result


def copy_rate(device: torch.device) -> float:
    """Give the bytes that a copy reads and writes, in TB/s."""
    source = torch.zeros(_GPU_COPY if device.type == "cuda" else _CPU_COPY, dtype=torch.uint8)
    source = source.to(device)
    target = torch.empty_like(source)
    return 2 * source.numel() / spread(lambda: target.copy_(source), device).us / 1e6


@contextlib.contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Raise `OutOfTimeError` in a block of the main thread that takes longer; None is no limit."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    # Again each second: what is raised inside of a destructor is lost.
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def machine(device: torch.device) -> dict[str, Any]:
    """Name the device, the versions, and how busy the machine is."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    versions["torch"] = torch.__version__
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": name,
        "versions": versions,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "load": load(),
    }


def load() -> list[float]:
    """Give the machine's load averages of 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]
