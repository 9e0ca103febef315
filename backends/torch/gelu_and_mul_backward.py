"""The reference of gelu_and_mul_backward."""

from torch_ops.declarations.gelu_and_mul_backward import gelu_and_mul_backward as _declaration

gelu_and_mul_backward = _declaration.reference
