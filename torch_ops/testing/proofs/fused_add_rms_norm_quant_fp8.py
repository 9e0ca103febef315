"""Proof of fused_add_rms_norm_quant_fp8."""

from torch import Tensor

from torch_ops.testing.proofs import _norm_faults as fault
from torch_ops.testing.proofs._fused_add import oracle, total
from torch_ops.testing.proofs._norms_quantization import norm_proof, wide_norm


def _wide(x: Tensor, r: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    stored = total(x, r)
    return wide_norm(stored, weight, eps), stored


proof = norm_proof(
    "fused_add_rms_norm_quant_fp8",
    "fused_add_rms_norm",
    ("x", "residual"),
    oracle,
    fault.fused_add(exact=True, norm=fault.rms(root=fault.with_eps(lambda _: 1e-2))),
    _wide,
)
