"""AITER's fused_add_rms_norm_cu, in place."""

from torch import Tensor

from torch_ops import limits

from . import _fused_add, _library

__all__ = ["fused_add_rms_norm_", "supports"]


def supports(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> str | None:
    return _fused_add.refusal(x, residual, weight)


def fused_add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    if x.numel():
        rows = limits.rows
        _library.run("fused_add_rms_norm_cu", x, rows(x), rows(residual), weight, eps)
