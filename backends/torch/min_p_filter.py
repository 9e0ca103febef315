"""The reference of min_p_filter."""

from torch_ops.declarations.min_p_filter import min_p_filter as _declaration

min_p_filter = _declaration.reference
