"""The reference of quantize_fp8_per_token, compiled."""

from torch_ops.declarations.quantize_fp8_per_token import quantize_fp8_per_token as _declaration

from ._compiled import compiled

quantize_fp8_per_token, supports = compiled(_declaration, row_arguments=("x",), float8=True)
