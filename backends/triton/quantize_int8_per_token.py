"""quantize_int8_per_token in Triton."""

import torch
from torch import Tensor

from ._launch import refuses_bfloat16
from ._quantization import quantize_rows

__all__ = ["quantize_int8_per_token", "supports"]


def quantize_int8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_rows(x, torch.int8)


supports = refuses_bfloat16(quantize_int8_per_token)
