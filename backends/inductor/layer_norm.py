"""The reference of layer_norm, compiled."""

from torch_ops.declarations.layer_norm import layer_norm as _declaration

from ._compiled import compiled

layer_norm, supports = compiled(_declaration, row_arguments=("x",))
