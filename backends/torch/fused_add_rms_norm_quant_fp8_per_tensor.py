"""The reference of fused_add_rms_norm_quant_fp8_per_tensor."""

from torch_ops.declarations.fused_add_rms_norm_quant_fp8_per_tensor import (
    fused_add_rms_norm_quant_fp8_per_tensor as _declaration,
)

fused_add_rms_norm_quant_fp8_per_tensor = _declaration.reference
