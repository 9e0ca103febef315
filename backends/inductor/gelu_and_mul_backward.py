"""The reference of gelu_and_mul_backward, compiled."""

from torch_ops.declarations.gelu_and_mul_backward import gelu_and_mul_backward as _declaration

from ._compiled import compiled

gelu_and_mul_backward, supports = compiled(_declaration, row_arguments=("x", "grad"))
