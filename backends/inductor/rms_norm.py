"""The reference of rms_norm, compiled."""

from torch_ops.declarations.rms_norm import rms_norm as _declaration

from ._compiled import compiled

rms_norm, supports = compiled(_declaration, row_arguments=("x",))
