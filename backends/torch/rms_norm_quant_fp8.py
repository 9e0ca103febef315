"""The reference of rms_norm_quant_fp8."""

from torch_ops.declarations.rms_norm_quant_fp8 import rms_norm_quant_fp8 as _declaration

rms_norm_quant_fp8 = _declaration.reference
