"""Proof of rms_norm_backward."""

from torch_ops.testing.proofs._norm_gradient_faults import RMS, mutants
from torch_ops.testing.proofs._norm_gradients import gradient_proof

proof = gradient_proof(RMS, mutants(RMS))
