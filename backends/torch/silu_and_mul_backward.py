"""The reference of silu_and_mul_backward."""

from torch_ops.declarations.silu_and_mul_backward import silu_and_mul_backward as _declaration

silu_and_mul_backward = _declaration.reference
