"""silu_and_mul_quant_fp8_per_tensor in Triton."""

from torch import Tensor

from torch_ops.declarations._quantization import fp8_of

from ._gate_quantization import gated_quantize
from ._gates import SILU
from ._launch import refuses_float8
from ._quantization import Scales

__all__ = ["silu_and_mul_quant_fp8_per_tensor", "supports"]


def silu_and_mul_quant_fp8_per_tensor(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return gated_quantize(x, SILU, fp8_of(x), Scales(given=scale))


supports = refuses_float8(silu_and_mul_quant_fp8_per_tensor)
