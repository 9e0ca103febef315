"""The reference of layer_norm."""

from torch_ops.declarations.layer_norm import layer_norm as _declaration

layer_norm = _declaration.reference
