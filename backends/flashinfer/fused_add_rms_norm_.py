"""FlashInfer's fused_add_rmsnorm, in place.

It is never chosen: it normalizes the sum in float32, before it is rounded to be stored. The op's
contract is the norm of the stored sum, and the difference is as large as the rounding itself.
"""

from torch import Tensor

from torch_ops import limits

from . import _modules

__all__ = ["fused_add_rms_norm_", "supports"]


def supports(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> str | None:
    if x.dtype not in limits.HALVES:
        return limits.unsupported("x", x, limits.HALVES)
    return limits.unrounded_sum(x)


def fused_add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    if x.numel():
        rows = limits.rows
        fused = _modules.norm("fused_add_rmsnorm")
        fused(rows(x), rows(residual), weight, eps, _modules.pdl(x))
