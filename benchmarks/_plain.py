"""Operators without this project's layer: a kernel behind ``define`` and ``impl``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, fallthrough_kernel, register_fake

from torch_ops.declare import Declaration

NAMESPACE = "torch_ops_benchmark"
_DEVICES = ("CPU", "CUDA")
_library = Library(NAMESPACE, "FRAGMENT")


def define(name: str, declaration: Declaration, function: Callable[..., Any]) -> Any:
    """Make a function an operator of a declared op's schema, with its fake and nothing more."""
    _library.define(f"{name}{declaration.schema}")
    for device in _DEVICES:
        _library.impl(name, function, device)
        _library.impl(name, fallthrough_kernel, f"Autograd{device}")
    if declaration.mutates:
        _library.impl(name, fallthrough_kernel, "ADInplaceOrView")
    register_fake(f"{NAMESPACE}::{name}", declaration.faker, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name)
