"""The reference of gelu_tanh_and_mul_backward, compiled."""

from torch_ops.declarations.gelu_tanh_and_mul_backward import (
    gelu_tanh_and_mul_backward as _declaration,
)

from ._compiled import compiled

gelu_tanh_and_mul_backward, supports = compiled(_declaration, row_arguments=("x", "grad"))
