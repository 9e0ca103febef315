"""The reference of paged_decode."""

from torch_ops.declarations.paged_decode import paged_decode as _declaration

paged_decode = _declaration.reference
