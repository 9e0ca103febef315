"""AITER's rmsnorm with its gemma_norm: it adds 1 to the weight in float32."""

from torch import Tensor

from torch_ops import limits

from . import _library, _rows

__all__ = ["gemma_rms_norm", "supports"]

_WIDTH = 8192  # a row is kept in registers of one block


def supports(x: Tensor, weight: Tensor, eps: float = 1e-6) -> str | None:
    reason = _rows.norm(x, weight, limits.HALVES)
    if reason is None and x.shape[-1] > _WIDTH:
        return f"rows of {x.shape[-1]} (supported: up to {_WIDTH}, kept in registers)"
    return reason


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    out = x.new_empty(x.shape)
    if x.numel():
        _library.run("rmsnorm", x, limits.rows(out), limits.rows(x), weight, eps, True)
    return out
