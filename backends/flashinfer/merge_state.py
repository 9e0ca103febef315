"""FlashInfer's merge_state; its LSEs are logarithms in base 2.

It is never chosen: two parts without keys give NaN, and the values of one part without keys are
read, so that NaN in them spreads. Telling such rows apart would take a pass over all values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_ops import limits

from . import _modules

__all__ = ["merge_state", "supports"]


def supports(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> str | None:
    if v_a.dtype not in limits.HALVES:
        return limits.unsupported("v_a", v_a, limits.HALVES)
    return (
        "parts without keys give NaN, and their values are read (the op's contract: zeros and "
        "-inf where both are empty, values of an empty part never read)"
    )


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    v = torch.empty_like(v_a, memory_format=torch.contiguous_format)
    s = torch.empty_like(s_a, memory_format=torch.contiguous_format)
    if v.numel():
        to_base_2 = 1 / math.log(2)
        _modules.cascade()(v_a, s_a * to_base_2, v_b, s_b * to_base_2, v, s)
        s *= math.log(2)
    return v, s
