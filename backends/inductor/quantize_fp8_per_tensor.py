"""The reference of quantize_fp8_per_tensor, compiled."""

from torch_ops.declarations.quantize_fp8_per_tensor import quantize_fp8_per_tensor as _declaration

from ._compiled import compiled

quantize_fp8_per_tensor, supports = compiled(_declaration, float8=True)
