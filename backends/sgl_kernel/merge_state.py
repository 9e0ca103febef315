"""sgl-kernel's merge_state_v2.

It is never chosen: two parts without keys give NaN, and the values of one part without keys are
read, so that NaN in them spreads. Telling such rows apart would take a pass over all values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import limits

from . import _library

__all__ = ["merge_state", "supports"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def supports(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> str | None:
    if v_a.dtype not in _DTYPES:
        return limits.unsupported("v_a", v_a, _DTYPES)
    return (
        "parts without keys give NaN, and their values are read (the op's contract: zeros and "
        "-inf where both are empty, values of an empty part never read)"
    )


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    v = torch.empty_like(v_a, memory_format=torch.contiguous_format)
    s = torch.empty_like(s_a, memory_format=torch.contiguous_format)
    if v.numel():
        _library.operator("merge_state_v2")(v_a, s_a, v_b, s_b, v, s)
    return v, s
