"""The reference of attention_with_lse."""

from torch_ops.declarations.attention_with_lse import attention_with_lse as _declaration

attention_with_lse = _declaration.reference
