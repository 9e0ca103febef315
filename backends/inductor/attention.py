"""The reference of attention, compiled."""

from torch_ops.declarations.attention import attention as _declaration

from ._compiled import compiled

attention, supports = compiled(_declaration)
