"""silu_and_mul; what fails is its launch."""

from __future__ import annotations

from torch import Tensor

import torch_ops_late
from torch_ops.declarations.silu_and_mul import silu_and_mul as _declaration


def silu_and_mul(x: Tensor) -> Tensor:
    if "launch" in torch_ops_late.broken:
        raise torch_ops_late.broken["launch"]
    result: Tensor = _declaration.reference(x)
    return result
