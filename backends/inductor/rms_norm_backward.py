"""The reference of rms_norm_backward, compiled."""

from torch_ops.declarations.rms_norm_backward import rms_norm_backward as _declaration

from ._compiled import compiled

rms_norm_backward, supports = compiled(_declaration, row_arguments=("x", "grad", "residual_grad"))
