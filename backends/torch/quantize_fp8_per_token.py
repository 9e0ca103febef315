"""The reference of quantize_fp8_per_token."""

from torch_ops.declarations.quantize_fp8_per_token import quantize_fp8_per_token as _declaration

quantize_fp8_per_token = _declaration.reference
