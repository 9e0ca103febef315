"""sgl-kernel's operators, loaded once; what fails there fails explained."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.once import once

__all__ = ["operator", "pdl"]


@functools.cache
def operator(name: str, part: str = "") -> Callable[..., Any]:
    """Give ``torch.ops.sgl_kernel.<name>``, which a module of the package may have of its own."""
    once(("sgl_kernel",), "sgl-kernel's library", lambda: _load("sgl_kernel"))
    if part:
        once(("sgl_kernel", part), f"sgl-kernel's {part}", lambda: _load(f"sgl_kernel.{part}"))
    return getattr(torch.ops.sgl_kernel, name).default  # type: ignore[no-any-return]


def _load(module: str) -> bool:
    """Import a module, which registers them; its own warnings are no fault of the caller."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(module)
    return True


def pdl(x: Tensor) -> bool:
    """Whether a launch may overlap with the end of the one before it, as sgl-kernel's own do."""
    return _overlaps(x.get_device())


@functools.cache
def _overlaps(index: int) -> bool:
    return index >= 0 and torch.cuda.get_device_capability(index) >= (9, 0)
