"""Proof of fused_add_rms_norm_: residual becomes ``x + residual``, x becomes its norm."""

from torch_ops.testing.proofs._fused_add import fused_add_proof

proof = fused_add_proof("fused_add_rms_norm_", ("x", "residual"))
