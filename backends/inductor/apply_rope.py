"""The reference of apply_rope, compiled."""

from torch_ops.declarations.apply_rope import apply_rope as _declaration

from ._compiled import compiled

apply_rope, supports = compiled(_declaration)
