"""AITER's rmsnorm2d_fwd_with_add with its gemma_norm."""

from torch import Tensor

from . import _fused_add

__all__ = ["gemma_fused_add_rms_norm", "supports"]


def supports(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> str | None:
    return _fused_add.refusal(x, residual, weight)


def gemma_fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    return _fused_add.fuse(x, residual, weight, eps, gemma_norm=True)
