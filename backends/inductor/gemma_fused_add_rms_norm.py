"""The reference of gemma_fused_add_rms_norm, compiled."""

from torch_ops.declarations.gemma_fused_add_rms_norm import gemma_fused_add_rms_norm as _declaration

from ._compiled import compiled

gemma_fused_add_rms_norm, supports = compiled(_declaration, row_arguments=("x", "residual"))
