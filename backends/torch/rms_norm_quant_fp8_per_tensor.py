"""The reference of rms_norm_quant_fp8_per_tensor."""

from torch_ops.declarations.rms_norm_quant_fp8_per_tensor import (
    rms_norm_quant_fp8_per_tensor as _declaration,
)

rms_norm_quant_fp8_per_tensor = _declaration.reference
