"""Wrong kernels, and the references that they differ from in one thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torch_ops.declarations import catalogue

from .scenario import SCENARIOS, Check

FAR = 2**12
One: TypeAlias = Callable[..., Tensor]
Two: TypeAlias = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Fault:
    """A wrong kernel that a scenario has to find.

    Attributes:
        check: The scenario.
        op, dtype: What it is tried on.
        function: The kernel, which returns outputs even where the op mutates.
    """

    check: Check
    op: str
    dtype: torch.dtype
    function: Callable[..., Any]

    def __str__(self) -> str:
        rows = next(scenario.rows for scenario in SCENARIOS if scenario.check is self.check)
        return f"{'-'.join(rows)}-{self.op}-{self.function.__name__.strip('_')}"


def right(op: str) -> Any:
    """Give the reference of an op."""
    return catalogue()[op].reference


def wrapped(x: Tensor) -> Tensor:
    """Read rows past the limit where their offset wraps."""
    size = x[0].numel()
    return x[(torch.arange(len(x)) * size % FAR) // size]
