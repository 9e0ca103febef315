"""rms_norm_quant_fp8: rms_norm, then quantize_fp8_per_token of what it gives."""

from __future__ import annotations

from torch import Tensor

from torch_ops.contracts import QuantizationContract
from torch_ops.declarations import _quantization
from torch_ops.declarations._shared import upcast
from torch_ops.declarations.rms_norm import rms_norm
from torch_ops.declare import op
from torch_ops.inlined import rounded

_normalize = rms_norm.reference


@op(contract=QuantizationContract(quantized="rounded"), dtypes=_quantization.DTYPES)
def rms_norm_quant_fp8(x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Normalize the last axis by its root mean square and quantize it to float8 by rows.

    As `quantize_fp8_per_token` of `rms_norm`, whose result is rounded to the dtype of x in
    between: a backend's two ops and this one give the same bits.

    Args:
        x: ``[..., hidden]`` float32, float16 or bfloat16, any strides.
        weight: ``[hidden]`` of a floating dtype.
        eps: Added to the mean of squares, >= 0.

    Returns:
        ``(q, scale)``, those of `quantize_fp8_per_token`: ``[..., hidden]`` float8 and
        ``[..., 1]`` float32. A row with NaN or an infinity is undefined.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, or ``eps`` is negative.
        NoBackwardError: an input requires grad.
    """
    normed = _normalize(x, weight, eps)
    return _quantization.quantize_rows(upcast(rounded(normed)), _quantization.fp8_of(x))


rms_norm_quant_fp8.batch("x")


@rms_norm_quant_fp8.check
def _check(x: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    _quantization.check_norm("rms_norm_quant_fp8", x, weight, eps)


@rms_norm_quant_fp8.fake
def _fake(x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    return _quantization.empty(x, _quantization.fp8_of(x), 1)
