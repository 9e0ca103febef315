"""The reference of gelu_and_mul."""

from torch_ops.declarations.gelu_and_mul import gelu_and_mul as _declaration

gelu_and_mul = _declaration.reference
