"""The reference of fused_experts."""

from torch_ops.declarations.fused_experts import fused_experts as _declaration

fused_experts = _declaration.reference
