"""Proof of silu_and_mul_quant_fp8_per_group."""

from torch_ops.testing.proofs._fused_proofs import gate_proof
from torch_ops.testing.proofs._fused_quantization import GROUPS

proof = gate_proof("silu_and_mul_quant_fp8_per_group", GROUPS)
