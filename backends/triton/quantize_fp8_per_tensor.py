"""quantize_fp8_per_tensor in Triton."""

from torch import Tensor

from torch_ops.declarations._quantization import fp8_of

from ._launch import refuses_float8
from ._quantization import quantize_tensor

__all__ = ["quantize_fp8_per_tensor", "supports"]


def quantize_fp8_per_tensor(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return quantize_tensor(x, scale, fp8_of(x))


supports = refuses_float8(quantize_fp8_per_tensor)
