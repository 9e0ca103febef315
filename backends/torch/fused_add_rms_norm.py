"""The reference of fused_add_rms_norm."""

from torch_ops.declarations.fused_add_rms_norm import fused_add_rms_norm as _declaration

fused_add_rms_norm = _declaration.reference
