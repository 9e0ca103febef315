"""What the gated activations share: splitting, checks and fake."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import checks
from torch_ops.declarations._shared import upcast

__all__ = ["check", "check_backward", "fake", "fake_backward", "gradient", "split"]


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Give gate and value of ``[..., 2d]`` in the accumulation dtype."""
    half = x.shape[-1] // 2
    wide = upcast(x)
    return wide[..., :half], wide[..., half:]


def check(op: str, x: Tensor) -> None:
    """Refuse anything but a floating ``[..., 2d]`` tensor."""
    checks.float_dtype(op, "x", x)
    if x.dim() < 1:
        checks.refuse(op, "x", "of shape []", "rank >= 1, [..., 2d]")
    if x.shape[-1] % 2:
        checks.refuse(
            op, "x", f"of shape {list(x.shape)}", f"an even last dimension, not {x.shape[-1]}"
        )


def fake(x: Tensor) -> Tensor:
    """Give an empty ``[..., d]``."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def check_backward(op: str, x: Tensor, grad: Tensor) -> None:
    """Refuse all but an ``x`` that the gate takes and a gradient like its result."""
    check(op, x)
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    checks.shape(op, "grad", grad, shape, "that of the result, [..., d]")
    checks.like(op, "grad", grad, x, "x")


def fake_backward(x: Tensor) -> Tensor:
    """Give an empty gradient of ``x``."""
    return x.new_empty(x.shape)


def gradient(grad: Tensor, x: Tensor, act: Tensor, slope: Tensor) -> Tensor:
    """Give the gradient of ``act * value`` with respect to gate and value, side by side.

    Args:
        grad: Of the result.
        x: Gate and value, as the op takes them.
        act, slope: The activation of the gate and its derivative, in the accumulation dtype.
    """
    wide, (_, value) = upcast(grad), split(x)
    return torch.cat([wide * value * slope, wide * act], -1).to(x.dtype)
