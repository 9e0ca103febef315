"""The reference of varlen_attention_with_lse."""

from torch_ops.declarations.varlen_attention_with_lse import (
    varlen_attention_with_lse as _declaration,
)

varlen_attention_with_lse = _declaration.reference
