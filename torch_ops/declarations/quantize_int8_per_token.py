"""quantize_int8_per_token: int8 codes with a scale for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.contracts import QuantizationContract
from torch_ops.declarations import _quantization
from torch_ops.declarations._shared import upcast
from torch_ops.declare import op


@op(contract=QuantizationContract(codes="int8", per="token"), dtypes=_quantization.DTYPES)
def quantize_int8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row of the last axis to int8 with a scale of its own.

    scale = max(max(abs(x), -1), 1e-10) / 127
    q = round(clamp(x / scale, -127, 127))

    Args:
        x: ``[..., hidden]`` float32, float16 or bfloat16, any strides.

    Returns:
        ``(q, scale)``: q ``[..., hidden]`` int8, contiguous, from -127 to 127; scale ``[..., 1]``
        float32. Rounded to nearest even. A row with NaN or an infinity is undefined.

    Raises:
        TypeError: the dtype isn't accepted.
        ValueError: x has no axis.
        NoBackwardError: the input requires grad.
    """
    return _quantization.quantize_rows(upcast(x), torch.int8)


quantize_int8_per_token.batch("x")


@quantize_int8_per_token.check
def _check(x: Tensor) -> None:
    _quantization.check("quantize_int8_per_token", x)


@quantize_int8_per_token.fake
def _fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return _quantization.empty(x, torch.int8, 1)
