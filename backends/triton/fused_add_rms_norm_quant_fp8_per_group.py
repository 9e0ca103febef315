"""fused_add_rms_norm_quant_fp8_per_group in Triton."""

from torch import Tensor

from torch_ops.declarations._quantization import fp8_of

from ._launch import refuses_float8
from ._norm_quantization import add_normalize_quantize
from ._quantization import Scales

__all__ = ["fused_add_rms_norm_quant_fp8_per_group", "supports"]


def fused_add_rms_norm_quant_fp8_per_group(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, group_size: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    return add_normalize_quantize(x, residual, weight, eps, fp8_of(x), Scales(group=group_size))


supports = refuses_float8(fused_add_rms_norm_quant_fp8_per_group)
