"""The reference of gemma_fused_add_rms_norm."""

from torch_ops.declarations.gemma_fused_add_rms_norm import gemma_fused_add_rms_norm as _declaration

gemma_fused_add_rms_norm = _declaration.reference
