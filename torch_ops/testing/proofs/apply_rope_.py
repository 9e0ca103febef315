"""Proof of apply_rope_: queries and keys are written over."""

from torch_ops.testing.proofs._rope import rope_proof

proof = rope_proof("apply_rope_", ("q", "k"))
