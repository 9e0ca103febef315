"""The gated activations of AITER: in float32, rounded once."""

from __future__ import annotations

from torch import Tensor

from torch_ops import limits

from . import _library, _rows

__all__ = ["activate", "refusal"]


def refusal(x: Tensor) -> str | None:
    """Give why a gated activation can't be had of these rows, or None."""
    return limits.gate(x, _rows.DTYPES) or _rows.cut(x)


def activate(name: str, x: Tensor) -> Tensor:
    """Run one of them into a fresh tensor."""
    *lead, width = x.shape
    out = x.new_empty((*lead, width // 2))
    if out.numel():
        _library.run(name, x, out, x)
    return out
