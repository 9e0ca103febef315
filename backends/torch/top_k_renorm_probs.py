"""The reference of top_k_renorm_probs."""

from torch_ops.declarations.top_k_renorm_probs import top_k_renorm_probs as _declaration

top_k_renorm_probs = _declaration.reference
