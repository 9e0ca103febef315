"""The reference of apply_rope."""

from torch_ops.declarations.apply_rope import apply_rope as _declaration

apply_rope = _declaration.reference
