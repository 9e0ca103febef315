"""The reference of silu_and_mul, compiled."""

from torch_ops.declarations.silu_and_mul import silu_and_mul as _declaration

from ._compiled import compiled

silu_and_mul, supports = compiled(_declaration, row_arguments=("x",))
