"""Derivatives that no backend has: ``torch.func`` and forward mode, refused and never zero.

Autograd falls through our operators, so ``grad`` and ``jvp`` would find constants there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_gradtrackingtensor
from torch.autograd import forward_ad
from torch.library import Library, get_kernel

from torch_ops import dynamo

__all__ = ["any_tangent", "guard"]

_KEY = "FuncTorchDynamicLayerFrontMode"


def guard(library: Library, overload: str, refuse: Callable[[], Exception]) -> None:
    """Raise where a transform asks for a derivative; all else goes PyTorch's way.

    The kernel stands under a key that is active inside of transforms alone.
    """
    original = get_kernel(f"{library.ns}::{overload}", _KEY)

    def kernel(keys: Any, *args: Any) -> Any:
        if any(isinstance(arg, Tensor) and _wants_derivative(arg) for arg in args):
            raise refuse()
        return original.call_boxed(keys, *args)

    dynamo.skip(kernel.__code__)
    library.impl(overload, kernel, _KEY, with_keyset=True)


def _wants_derivative(tensor: Tensor) -> bool:
    if not is_gradtrackingtensor(tensor):
        return False
    return (tensor.requires_grad and torch.is_grad_enabled()) or any_tangent((tensor,))


def any_tangent(args: tuple[Any, ...]) -> bool:
    """Whether an argument carries a tangent of forward mode."""
    if forward_ad._current_level < 0:
        return False
    return any(
        isinstance(arg, Tensor) and forward_ad.unpack_dual(arg).tangent is not None for arg in args
    )
