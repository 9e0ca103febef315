"""The reference of gelu_tanh_and_mul_backward."""

from torch_ops.declarations.gelu_tanh_and_mul_backward import (
    gelu_tanh_and_mul_backward as _declaration,
)

gelu_tanh_and_mul_backward = _declaration.reference
