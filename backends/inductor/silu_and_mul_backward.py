"""The reference of silu_and_mul_backward, compiled."""

from torch_ops.declarations.silu_and_mul_backward import silu_and_mul_backward as _declaration

from ._compiled import compiled

silu_and_mul_backward, supports = compiled(_declaration, row_arguments=("x", "grad"))
