"""sgl-kernel's topk_softmax.

It is never chosen: a row with NaN gives an expert more than once, and experts whose probabilities
are equal in float32 are not ordered by their logits. Telling such rows apart would take a pass
over all logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import limits

from . import _library

__all__ = ["supports", "topk_softmax"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def supports(logits: Tensor, k: int, renormalize: bool = False) -> str | None:
    if logits.dtype not in _DTYPES:
        return limits.unsupported("logits", logits, _DTYPES)
    return (
        "a row with NaN gives an expert more than once, and equal probabilities aren't ordered by "
        "their logits (the op's contract: distinct ids, ordered by logits)"
    )


def topk_softmax(logits: Tensor, k: int, renormalize: bool = False) -> tuple[Tensor, Tensor]:
    weights = logits.new_empty((logits.shape[0], k), dtype=torch.float32)
    ids = logits.new_empty((logits.shape[0], k), dtype=torch.int32)
    if ids.numel():
        packed = logits.contiguous()
        if packed.data_ptr() % 16:  # rows are read in vectors of up to 16 bytes
            packed = packed.clone()
        _library.operator("topk_softmax")(weights, ids, packed, renormalize, 0.0, None)
    return weights, ids
