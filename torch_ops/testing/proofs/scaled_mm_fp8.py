"""Proof of scaled_mm_fp8."""

from torch_ops.testing.proofs._scaled_mm import proof_of_product

proof = proof_of_product("scaled_mm_fp8", "float8_e4m3fn", ("nan", "448"))
