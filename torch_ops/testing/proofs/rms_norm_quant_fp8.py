"""Proof of rms_norm_quant_fp8."""

from torch_ops.testing.proofs import _norm_faults as fault
from torch_ops.testing.proofs._norms_quantization import norm_proof, wide_norm
from torch_ops.testing.proofs.rms_norm import oracle

_wrong = fault.rms(root=fault.with_eps(lambda _: 1e-2))
proof = norm_proof("rms_norm_quant_fp8", "rms_norm", ("x",), oracle, _wrong, wide_norm)
