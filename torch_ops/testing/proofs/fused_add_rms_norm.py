"""Proof of fused_add_rms_norm: ``residual_out = x + residual``, ``out = norm(residual_out)``."""

from torch_ops.testing.proofs._fused_add import fused_add_proof

proof = fused_add_proof("fused_add_rms_norm", ())
