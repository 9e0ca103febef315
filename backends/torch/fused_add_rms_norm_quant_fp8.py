"""The reference of fused_add_rms_norm_quant_fp8."""

from torch_ops.declarations.fused_add_rms_norm_quant_fp8 import (
    fused_add_rms_norm_quant_fp8 as _declaration,
)

fused_add_rms_norm_quant_fp8 = _declaration.reference
