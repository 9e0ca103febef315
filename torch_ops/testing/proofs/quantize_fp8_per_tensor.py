"""Proof of quantize_fp8_per_tensor."""

from torch_ops.testing.proofs._quantization import Form
from torch_ops.testing.proofs._quantization_proof import quantization_proof

proof = quantization_proof(Form("quantize_fp8_per_tensor", "tensor"))
