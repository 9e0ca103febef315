"""The reference of scaled_mm_int8."""

from torch_ops.declarations.scaled_mm_int8 import scaled_mm_int8 as _declaration

scaled_mm_int8 = _declaration.reference
