"""Times of a call: of a CUDA graph with a cold L2 cache, or of the wall on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["captured", "median_us"]

LEAST, MOST = 10, 2000  # repetitions


def median_us(call: Callable[[], Any], device: torch.device, milliseconds: float = 50.0) -> float:
    """Give the median time of a call in microseconds, after it has run."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _of_graph(captured(call), device, milliseconds)
    call()
    times: list[float] = []
    end = time.perf_counter() + milliseconds / 1e3
    while len(times) < LEAST or (time.perf_counter() < end and len(times) < MOST):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Give what replays a call from a CUDA graph: no launch of the host is in its time.

    Raises:
        RuntimeError: it can't be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _of_graph(replay: Callable[[], Any], device: torch.device, milliseconds: float) -> float:
    """Time replays; what fills the L2 cache before each also hides the host's launch."""
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    other = torch.empty(max(size, 1 << 27), dtype=torch.uint8, device=device)

    def once() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        other.zero_()
        begin.record()
        replay()
        end.record()
        return begin, end

    def elapsed(count: int) -> list[float]:
        events = [once() for _ in range(count)]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]

    guess = statistics.median(elapsed(5)) + 0.05
    count = int(min(max(milliseconds / guess, LEAST), MOST))
    return statistics.median(elapsed(count)) * 1e3
