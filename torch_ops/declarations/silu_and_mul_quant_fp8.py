"""silu_and_mul_quant_fp8: silu_and_mul, then quantize_fp8_per_token of what it gives."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.contracts import QuantizationContract
from torch_ops.declarations import _gates, _quantization
from torch_ops.declarations._shared import upcast
from torch_ops.declarations.silu_and_mul import silu_and_mul
from torch_ops.declare import op
from torch_ops.inlined import rounded

_activate = silu_and_mul.reference


@op(contract=QuantizationContract(quantized="rounded"), dtypes=_quantization.DTYPES)
def silu_and_mul_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply the activated first half of the last axis by the second, and quantize it by rows.

    As `quantize_fp8_per_token` of `silu_and_mul`, whose result is rounded to the dtype of x in
    between: a backend's two ops and this one give the same bits.

    Args:
        x: ``[..., 2d]`` float32, float16 or bfloat16, any strides; the gate first.

    Returns:
        ``(q, scale)``, those of `quantize_fp8_per_token`: ``[..., d]`` float8 and ``[..., 1]``
        float32. A row with NaN or an infinity is undefined.

    Raises:
        TypeError: the dtype isn't accepted.
        ValueError: the last dimension is odd.
        NoBackwardError: the input requires grad.
    """
    gated = _activate(x)
    return _quantization.quantize_rows(upcast(rounded(gated)), _quantization.fp8_of(x))


silu_and_mul_quant_fp8.batch("x")


@silu_and_mul_quant_fp8.check
def _check(x: Tensor) -> None:
    _quantization.check("silu_and_mul_quant_fp8", x)
    _gates.check("silu_and_mul_quant_fp8", x)


@silu_and_mul_quant_fp8.fake
def _fake(x: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    codes = x.new_empty(shape, dtype=_quantization.fp8_of(x))
    return codes, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
