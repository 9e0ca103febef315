"""The reference of layer_norm_backward."""

from torch_ops.declarations.layer_norm_backward import layer_norm_backward as _declaration

layer_norm_backward = _declaration.reference
