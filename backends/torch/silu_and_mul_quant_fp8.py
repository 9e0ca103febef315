"""The reference of silu_and_mul_quant_fp8."""

from torch_ops.declarations.silu_and_mul_quant_fp8 import silu_and_mul_quant_fp8 as _declaration

silu_and_mul_quant_fp8 = _declaration.reference
