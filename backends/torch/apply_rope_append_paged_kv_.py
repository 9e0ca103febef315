"""The reference of apply_rope_append_paged_kv_."""

from torch_ops.declarations.apply_rope_append_paged_kv_ import (
    apply_rope_append_paged_kv_ as _declaration,
)

apply_rope_append_paged_kv_ = _declaration.reference
