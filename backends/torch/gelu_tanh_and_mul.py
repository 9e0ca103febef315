"""The reference of gelu_tanh_and_mul."""

from torch_ops.declarations.gelu_tanh_and_mul import gelu_tanh_and_mul as _declaration

gelu_tanh_and_mul = _declaration.reference
