"""Proof of layer_norm_backward."""

from torch_ops.testing.proofs._norm_gradient_faults import LAYER, mutants
from torch_ops.testing.proofs._norm_gradients import gradient_proof

proof = gradient_proof(LAYER, mutants(LAYER))
