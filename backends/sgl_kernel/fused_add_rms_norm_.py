"""sgl-kernel's fused_add_rmsnorm, in place."""

from torch import Tensor

from . import _fused_add

__all__ = ["fused_add_rms_norm_", "supports"]


def supports(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> str | None:
    return _fused_add.refusal(x, residual, weight)


def fused_add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    _fused_add.fuse(x, residual, weight, eps)
