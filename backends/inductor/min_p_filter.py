"""The reference of min_p_filter, compiled."""

from torch_ops.declarations.min_p_filter import min_p_filter as _declaration

from ._compiled import compiled

min_p_filter, supports = compiled(_declaration)
