"""Proof of scaled_mm_int8."""

from torch_ops.testing.proofs._scaled_mm import proof_of_product

proof = proof_of_product("scaled_mm_int8", "int8", ())
