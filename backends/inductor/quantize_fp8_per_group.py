"""The reference of quantize_fp8_per_group, compiled."""

from torch_ops.declarations.quantize_fp8_per_group import quantize_fp8_per_group as _declaration

from ._compiled import compiled

quantize_fp8_per_group, supports = compiled(_declaration, row_arguments=("x",), float8=True)
