"""The reference of attention_with_lse, compiled."""

from torch_ops.declarations.attention_with_lse import attention_with_lse as _declaration

from ._compiled import compiled

attention_with_lse, supports = compiled(_declaration)
