"""The reference of rms_norm_quant_fp8_per_group."""

from torch_ops.declarations.rms_norm_quant_fp8_per_group import (
    rms_norm_quant_fp8_per_group as _declaration,
)

rms_norm_quant_fp8_per_group = _declaration.reference
