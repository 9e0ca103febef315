"""The reference of silu_and_mul_quant_fp8, compiled."""

from torch_ops.declarations.silu_and_mul_quant_fp8 import silu_and_mul_quant_fp8 as _declaration

from ._compiled import compiled

silu_and_mul_quant_fp8, supports = compiled(_declaration, row_arguments=("x",), float8=True)
