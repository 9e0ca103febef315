"""The reference of fused_add_rms_norm_quant_fp8_per_group."""

from torch_ops.declarations.fused_add_rms_norm_quant_fp8_per_group import (
    fused_add_rms_norm_quant_fp8_per_group as _declaration,
)

fused_add_rms_norm_quant_fp8_per_group = _declaration.reference
