"""silu_and_mul_quant_fp8 in Triton."""

from torch import Tensor

from torch_ops.declarations._quantization import fp8_of

from ._gate_quantization import gated_quantize
from ._gates import SILU
from ._launch import refuses_float8

__all__ = ["silu_and_mul_quant_fp8", "supports"]


def silu_and_mul_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    return gated_quantize(x, SILU, fp8_of(x))


supports = refuses_float8(silu_and_mul_quant_fp8)
