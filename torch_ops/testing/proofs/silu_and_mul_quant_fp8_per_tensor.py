"""Proof of silu_and_mul_quant_fp8_per_tensor."""

from torch_ops.testing.proofs._fused_proofs import gate_proof
from torch_ops.testing.proofs._fused_quantization import GIVEN

proof = gate_proof("silu_and_mul_quant_fp8_per_tensor", GIVEN)
