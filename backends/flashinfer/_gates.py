"""The gated activations of FlashInfer."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _modules

__all__ = ["activate"]


def activate(name: str, x: Tensor) -> Tensor:
    """Run one of them into a fresh tensor."""
    *lead, width = x.shape
    out = x.new_empty((*lead, width // 2))
    if not out.numel():
        return out
    function, overlap, index = _modules.activation(name), _modules.pdl(x), x.get_device()
    if index < 0 or index == torch.cuda.current_device():
        function(out, x, overlap)
    else:  # it makes the tensor's device the current one and leaves it so
        with torch.cuda.device(index):
            function(out, x, overlap)
    return out
