"""The reference of fused_add_rms_norm_quant_fp8, compiled."""

from torch_ops.declarations.fused_add_rms_norm_quant_fp8 import (
    fused_add_rms_norm_quant_fp8 as _declaration,
)

from ._compiled import compiled

fused_add_rms_norm_quant_fp8, supports = compiled(
    _declaration, row_arguments=("x", "residual"), float8=True
)
