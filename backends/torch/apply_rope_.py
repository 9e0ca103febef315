"""The reference of apply_rope_."""

from torch_ops.declarations.apply_rope_ import apply_rope_ as _declaration

apply_rope_ = _declaration.reference
