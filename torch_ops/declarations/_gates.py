"""What the gated activations share: splitting, checks and fake."""

from __future__ import annotations

from torch import Tensor

from torch_ops import checks
from torch_ops.declarations._shared import upcast

__all__ = ["check", "fake", "split"]


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
