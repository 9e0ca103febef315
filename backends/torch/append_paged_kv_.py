"""The reference of append_paged_kv_."""

from torch_ops.declarations.append_paged_kv_ import append_paged_kv_ as _declaration

append_paged_kv_ = _declaration.reference
