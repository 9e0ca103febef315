"""The reference of quantize_int8_per_token."""

from torch_ops.declarations.quantize_int8_per_token import quantize_int8_per_token as _declaration

quantize_int8_per_token = _declaration.reference
