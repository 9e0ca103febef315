"""The reference of varlen_attention."""

from torch_ops.declarations.varlen_attention import varlen_attention as _declaration

varlen_attention = _declaration.reference
