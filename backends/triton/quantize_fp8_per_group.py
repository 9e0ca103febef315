"""quantize_fp8_per_group in Triton."""

from torch import Tensor

from torch_ops.declarations._quantization import fp8_of

from ._launch import refuses_float8
from ._quantization import quantize_groups

__all__ = ["quantize_fp8_per_group", "supports"]


def quantize_fp8_per_group(x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
    return quantize_groups(x, group_size, fp8_of(x))


supports = refuses_float8(quantize_fp8_per_group)
