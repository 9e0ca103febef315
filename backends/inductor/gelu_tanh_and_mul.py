"""The reference of gelu_tanh_and_mul, compiled."""

from torch_ops.declarations.gelu_tanh_and_mul import gelu_tanh_and_mul as _declaration

from ._compiled import compiled

gelu_tanh_and_mul, supports = compiled(_declaration, row_arguments=("x",))
