"""Proof of gelu_tanh_and_mul_backward."""

from torch_ops.testing.proofs._gate_gradients import gradient_proof

proof = gradient_proof("gelu_tanh_and_mul_backward", "gelu_tanh")
