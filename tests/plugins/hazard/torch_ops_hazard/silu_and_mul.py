"""silu_and_mul that reads address 0 for rows of more than 64 elements of float16."""

from __future__ import annotations

from torch import Tensor

from .faults import reads_address_0


def silu_and_mul(x: Tensor) -> Tensor:
    return reads_address_0(x)
