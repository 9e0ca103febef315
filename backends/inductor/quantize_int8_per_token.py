"""The reference of quantize_int8_per_token, compiled."""

from torch_ops.declarations.quantize_int8_per_token import quantize_int8_per_token as _declaration

from ._compiled import compiled

quantize_int8_per_token, supports = compiled(_declaration, row_arguments=("x",))
