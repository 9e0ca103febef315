"""The reference of gemma_rms_norm."""

from torch_ops.declarations.gemma_rms_norm import gemma_rms_norm as _declaration

gemma_rms_norm = _declaration.reference
