"""The reference of paged_prefill."""

from torch_ops.declarations.paged_prefill import paged_prefill as _declaration

paged_prefill = _declaration.reference
