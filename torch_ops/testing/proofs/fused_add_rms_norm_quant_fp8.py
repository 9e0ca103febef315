"""Proof of fused_add_rms_norm_quant_fp8."""

from torch_ops.testing.proofs._fused_proofs import added_norm_proof
from torch_ops.testing.proofs._fused_quantization import ROWS

proof = added_norm_proof("fused_add_rms_norm_quant_fp8", ROWS)
