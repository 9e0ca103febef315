"""Captures into CUDA graphs; on a CPU, where there are none, calls that are made again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from torch_ops import once

__all__ = ["Outputs", "capture", "pretend", "refill"]

Outputs = tuple[Tensor, ...]
Captured = tuple[Outputs, Callable[[], None]]


def capture(device: torch.device, call: Callable[[], Outputs]) -> Captured | Exception:
    """Capture a call: its outputs and what runs it again, or the error that it raised."""
    raised: list[Exception] = []

    def kept() -> Outputs:
        try:
            return call()
        except Exception as error:  # judged by the caller, when the capture has ended well
            raised.append(error)
            return (torch.zeros(1, device=device),)  # an empty graph is warned of

    found = _recorded(device, kept)
    return raised[0] if raised else found


def _recorded(device: torch.device, call: Callable[[], Outputs]) -> Captured:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        gc.collect()  # what is freed in a capture, a module of kernels say, ends it
        graph = torch.cuda.CUDAGraph()
        gc.disable()
        try:
            with torch.cuda.graph(graph):
                found = call()
        finally:
            gc.enable()
        return found, graph.replay
    found = call()

    def replay() -> None:
        refill(found, call())

    return found, replay


def refill(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give tensors other values where they are."""
    for tensor, value in zip(tensors, values, strict=True):
        if tensor is not value:
            tensor.copy_(value)


def pretend(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Outputs]
) -> Captured | Exception:
    """Capture a call; on a CPU, make the library think that a stream is capturing."""
    with monkeypatch.context() as patched:
        if device.type == "cpu":
            patched.setattr(once, "capturing", lambda: True)
        return capture(device, call)
