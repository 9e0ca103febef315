"""The reference of fused_add_rms_norm_."""

from torch_ops.declarations.fused_add_rms_norm_ import fused_add_rms_norm_ as _declaration

fused_add_rms_norm_ = _declaration.reference
