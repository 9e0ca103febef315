"""The reference of layer_norm_backward, compiled."""

from torch_ops.declarations.layer_norm_backward import layer_norm_backward as _declaration

from ._compiled import compiled

layer_norm_backward, supports = compiled(_declaration, row_arguments=("x", "grad"))
