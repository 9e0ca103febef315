"""The reference of merge_state, compiled."""

from torch_ops.declarations.merge_state import merge_state as _declaration

from ._compiled import compiled

merge_state, supports = compiled(_declaration)
