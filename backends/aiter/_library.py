"""AITER's functions, imported once; what fails there fails explained."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.once import once

__all__ = ["function", "run"]


@functools.cache
def function(name: str) -> Callable[..., Any]:
    """Give ``aiter.<name>``."""
    found: Callable[..., Any] = once(("aiter", name), f"AITER's {name}", lambda: _find(name))
    return found


def _find(name: str) -> Callable[..., Any]:
    """Import the package; what it warns of at its import is no fault of the caller."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module("aiter"), name)  # type: ignore[no-any-return]


def run(name: str, x: Tensor, *args: Any, **options: Any) -> Any:
    """Run one on the device of ``x``: some take the current device's stream, whatever they get."""
    call, index = function(name), x.get_device()
    if index < 0 or index == torch.cuda.current_device():
        return call(*args, **options)
    with torch.cuda.device(index):
        return call(*args, **options)
