"""The reference of moe_align_block_size."""

from torch_ops.declarations.moe_align_block_size import moe_align_block_size as _declaration

moe_align_block_size = _declaration.reference
