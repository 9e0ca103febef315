"""The reference of quantize_fp8_per_tensor."""

from torch_ops.declarations.quantize_fp8_per_tensor import quantize_fp8_per_tensor as _declaration

quantize_fp8_per_tensor = _declaration.reference
