"""The reference of silu_and_mul_quant_fp8_per_tensor."""

from torch_ops.declarations.silu_and_mul_quant_fp8_per_tensor import (
    silu_and_mul_quant_fp8_per_tensor as _declaration,
)

silu_and_mul_quant_fp8_per_tensor = _declaration.reference
