"""AITER's rms_norm."""

from torch import Tensor

from torch_ops import limits

from . import _library, _rows

__all__ = ["rms_norm", "supports"]


def supports(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> str | None:
    return _rows.norm(x, weight)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    if not x.numel():
        return x.new_empty(x.shape)
    out: Tensor = _library.run("rms_norm", x, limits.rows(x), weight, eps)
    return out.view(x.shape)
