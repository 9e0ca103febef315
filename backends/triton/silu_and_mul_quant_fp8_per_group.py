"""silu_and_mul_quant_fp8_per_group in Triton."""

from torch import Tensor

from torch_ops.declarations._quantization import fp8_of

from ._gate_quantization import gated_quantize
from ._gates import SILU
from ._launch import refuses_float8
from ._quantization import Scales

__all__ = ["silu_and_mul_quant_fp8_per_group", "supports"]


def silu_and_mul_quant_fp8_per_group(x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
    return gated_quantize(x, SILU, fp8_of(x), Scales(group=group_size))


supports = refuses_float8(silu_and_mul_quant_fp8_per_group)
