"""Proof of rms_norm_quant_fp8_per_group."""

from torch_ops.testing.proofs._fused_proofs import norm_proof
from torch_ops.testing.proofs._fused_quantization import GROUPS

proof = norm_proof("rms_norm_quant_fp8_per_group", GROUPS)
