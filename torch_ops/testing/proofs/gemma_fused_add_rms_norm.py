"""Proof of gemma_fused_add_rms_norm: as fused_add_rms_norm, scaled by one plus the weight."""

from torch_ops.testing.proofs._fused_add import fused_add_proof
from torch_ops.testing.proofs._norm_faults import one_plus

proof = fused_add_proof("gemma_fused_add_rms_norm", (), one_plus)
