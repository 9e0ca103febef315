"""Proof of quantize_fp8_per_token."""

from torch_ops.testing.proofs._quantization import Form
from torch_ops.testing.proofs._quantization_proof import quantization_proof

proof = quantization_proof(Form("quantize_fp8_per_token", "token"))
