"""rms_norm_quant_fp8_per_tensor in Triton."""

from torch import Tensor

from torch_ops.declarations._quantization import fp8_of

from ._launch import refuses_float8
from ._norm_quantization import normalize_quantize
from ._quantization import Scales

__all__ = ["rms_norm_quant_fp8_per_tensor", "supports"]


def rms_norm_quant_fp8_per_tensor(
    x: Tensor, weight: Tensor, scale: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    return normalize_quantize(x, weight, eps, fp8_of(x), Scales(given=scale))


supports = refuses_float8(rms_norm_quant_fp8_per_tensor)
