"""The reference of merge_state."""

from torch_ops.declarations.merge_state import merge_state as _declaration

merge_state = _declaration.reference
