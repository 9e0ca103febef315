"""The reference of top_p_renorm_probs."""

from torch_ops.declarations.top_p_renorm_probs import top_p_renorm_probs as _declaration

top_p_renorm_probs = _declaration.reference
