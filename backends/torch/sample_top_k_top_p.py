"""The reference of sample_top_k_top_p."""

from torch_ops.declarations.sample_top_k_top_p import sample_top_k_top_p as _declaration

sample_top_k_top_p = _declaration.reference
