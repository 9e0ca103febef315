"""quantize_fp8_per_token: float8 codes with a scale for each row."""

from __future__ import annotations

from torch import Tensor

from torch_ops.contracts import QuantizationContract
from torch_ops.declarations import _quantization
from torch_ops.declarations._shared import upcast
from torch_ops.declare import op


@op(contract=QuantizationContract(per="token"), dtypes=_quantization.DTYPES)
def quantize_fp8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row of the last axis to float8 with a scale of its own.

    scale = max(max(abs(x), -1), 1e-10) / largest
    q = round(clamp(x / scale, -largest, largest))

    The scales fit `torch._scaled_mm`: of ``[tokens, hidden]`` they are its ``[tokens, 1]``.

    Args:
        x: ``[..., hidden]`` float32, float16 or bfloat16, any strides.

    Returns:
        ``(q, scale)``: q ``[..., hidden]``, contiguous, float8_e4m3fn (largest 448), on gfx94x
        float8_e4m3fnuz (240); scale ``[..., 1]`` float32. Rounded to nearest even. A row with NaN
        or an infinity is undefined.

    Raises:
        TypeError: the dtype isn't accepted.
        ValueError: x has no axis.
        NoBackwardError: the input requires grad.

    Source: Micikevicius et al., FP8 Formats for Deep Learning (arXiv 2209.05433).
    """
    return _quantization.quantize_rows(upcast(x), _quantization.fp8_of(x))


quantize_fp8_per_token.batch("x")


@quantize_fp8_per_token.check
def _check(x: Tensor) -> None:
    _quantization.check("quantize_fp8_per_token", x)


@quantize_fp8_per_token.fake
def _fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return _quantization.empty(x, _quantization.fp8_of(x), 1)
