"""The operators that compiled graphs call, ``torch_ops_compiled::<op>``: without argument checks.

A graph's fakes have made the checks and its guards see that they hold, so Inductor's code calls
these in place of ``torch_ops::<op>``. They aren't for anybody else. Each has the schema of the
operator that it stands for, ``.backend`` overload included, and exists since the declaration: a
cached graph of another process finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, fallthrough_kernel

from torch_ops import dynamo, inductor, schema
from torch_ops.declare import COMPILED, Declaration

__all__ = ["define", "lower"]

_library = Library(COMPILED, "FRAGMENT")  # kept for ever: a collected library crashes its ops


def define(declaration: Declaration, named: bool, kernels: dict[str, Callable[..., Any]]) -> None:
    """Make the operator of one overload.

    Args:
        declaration: The op.
        named: Whether it is the ``.backend`` overload.
        kernels: What runs legal calls, by dispatch key of the device.
    """
    overload, arguments = declaration.name, declaration.schema
    if named:
        overload, arguments = f"{overload}.backend", schema.backend_overload(arguments)
    _library.define(f"{overload}{arguments}")
    for key, kernel in kernels.items():
        dynamo.skip(kernel.__code__)
        _library.impl(overload, kernel, key)
        _library.impl(overload, fallthrough_kernel, f"Autograd{key}")
    if declaration.mutates:
        _library.impl(overload, fallthrough_kernel, "ADInplaceOrView", allow_override=True)
    _library.impl(overload, _fake(declaration, named), "Meta")


def _fake(declaration: Declaration, named: bool) -> Callable[..., Any]:
    def fake(*args: Any) -> Any:
        return declaration.faker(*(args[:-1] if named else args))

    return fake


def lower(op: str, named: bool) -> None:
    """Have Inductor, where it is loaded, call the operator of an overload from now on."""
    overload = "backend" if named else "default"
    inductor.substitute(
        getattr(getattr(torch.ops.torch_ops, op), overload),
        getattr(getattr(torch.ops.torch_ops_compiled, op), overload),
    )
