"""The reference of silu_and_mul."""

from torch_ops.declarations.silu_and_mul import silu_and_mul as _declaration

silu_and_mul = _declaration.reference
