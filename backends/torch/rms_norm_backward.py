"""The reference of rms_norm_backward."""

from torch_ops.declarations.rms_norm_backward import rms_norm_backward as _declaration

rms_norm_backward = _declaration.reference
