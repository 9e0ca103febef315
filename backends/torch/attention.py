"""The reference of attention."""

from torch_ops.declarations.attention import attention as _declaration

attention = _declaration.reference
