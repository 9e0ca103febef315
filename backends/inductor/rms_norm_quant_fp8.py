"""The reference of rms_norm_quant_fp8, compiled."""

from torch_ops.declarations.rms_norm_quant_fp8 import rms_norm_quant_fp8 as _declaration

from ._compiled import compiled

rms_norm_quant_fp8, supports = compiled(_declaration, row_arguments=("x",), float8=True)
