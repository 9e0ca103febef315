"""The reference of mla_decode."""

from torch_ops.declarations.mla_decode import mla_decode as _declaration

mla_decode = _declaration.reference
