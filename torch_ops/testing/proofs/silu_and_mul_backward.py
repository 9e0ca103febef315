"""Proof of silu_and_mul_backward."""

from torch_ops.testing.proofs._gate_gradients import gradient_proof

proof = gradient_proof("silu_and_mul_backward", "silu")
