"""The reference of rms_norm."""

from torch_ops.declarations.rms_norm import rms_norm as _declaration

rms_norm = _declaration.reference
