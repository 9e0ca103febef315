"""The reference of scaled_mm_fp8."""

from torch_ops.declarations.scaled_mm_fp8 import scaled_mm_fp8 as _declaration

scaled_mm_fp8 = _declaration.reference
