"""The reference of fused_add_rms_norm, compiled."""

from torch_ops.declarations.fused_add_rms_norm import fused_add_rms_norm as _declaration

from ._compiled import compiled

fused_add_rms_norm, supports = compiled(_declaration, row_arguments=("x", "residual"))
