"""The reference of quantize_fp8_per_group."""

from torch_ops.declarations.quantize_fp8_per_group import quantize_fp8_per_group as _declaration

quantize_fp8_per_group = _declaration.reference
