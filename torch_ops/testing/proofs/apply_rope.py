"""Proof of apply_rope."""

from torch_ops.testing.proofs._rope import rope_proof

proof = rope_proof("apply_rope", ())
