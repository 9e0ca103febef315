"""Proof of silu_and_mul_quant_fp8."""

from torch_ops.testing.proofs._fused_proofs import gate_proof
from torch_ops.testing.proofs._fused_quantization import ROWS

proof = gate_proof("silu_and_mul_quant_fp8", ROWS)
