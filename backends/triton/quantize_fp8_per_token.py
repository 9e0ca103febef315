"""quantize_fp8_per_token in Triton."""

from torch import Tensor

from torch_ops.declarations._quantization import fp8_of

from ._launch import refuses_float8
from ._quantization import quantize_rows

__all__ = ["quantize_fp8_per_token", "supports"]


def quantize_fp8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_rows(x, fp8_of(x))


supports = refuses_float8(quantize_fp8_per_token)
