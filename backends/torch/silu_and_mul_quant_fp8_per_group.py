"""The reference of silu_and_mul_quant_fp8_per_group."""

from torch_ops.declarations.silu_and_mul_quant_fp8_per_group import (
    silu_and_mul_quant_fp8_per_group as _declaration,
)

silu_and_mul_quant_fp8_per_group = _declaration.reference
