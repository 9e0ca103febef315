"""Calls that look like one before: what is remembered of an op, and what skips dispatch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from torch_ops import ops
from torch_ops.familiar import Look

X, WEIGHT = torch.randn(3, 8), torch.randn(8)
RMS: Any = torch.ops.torch_ops.rms_norm


def looks_of(op: str) -> dict[torch.Size, Look]:
    """What is remembered of an op."""
    looks: dict[torch.Size, Look] = (
        inspect.getclosurevars(getattr(ops, op)).nonlocals["_looked"].__self__
    )
    return looks


class Shortcuts:
    """Counts the calls of an op that go past the dispatcher."""

    def __init__(self, op: str) -> None:
        self.count = 0
        looks = looks_of(op)
        for shape, look in looks.items():
            looks[shape] = look._replace(call=self._counting(look.call))

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            below_dispatcher = ("kernel", "autograd")
            self.count += sys._getframe(1).f_code.co_name not in below_dispatcher
            return call(*args)

        return counted


def known(op: str = "rms_norm", *args: Any) -> Shortcuts:
    """Make a call familiar and count what skips the dispatcher from now on."""
    args = args or (X, WEIGHT)
    for _ in range(2):
        getattr(ops, op)(*args)
    assert len(looks_of(op)) == 1
    return Shortcuts(op)
