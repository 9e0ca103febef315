"""quantize_fp8_per_tensor: float8 codes with one scale, computed or given."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.contracts import QuantizationContract
from torch_ops.declarations import _quantization
from torch_ops.declarations._shared import upcast
from torch_ops.declare import op


@op(contract=QuantizationContract(per="tensor"), dtypes=_quantization.DTYPES)
def quantize_fp8_per_tensor(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize a tensor to float8 with one scale.

    scale = max(max(abs(x)), 1e-10) / largest, where none is given
    q = round(clamp(x / scale, -largest, largest))

    Args:
        x: ``[..., hidden]`` float32, float16 or bfloat16, any strides.
        scale: ``[1]`` or ``[]`` float32, a normal number greater than 0; None computes it.

    Returns:
        ``(q, scale)``: q ``[..., hidden]``, contiguous, float8_e4m3fn (largest 448), on gfx94x
        float8_e4m3fnuz (240); scale ``[1]`` float32, a copy of one that was given. Rounded to
        nearest even. With NaN or an infinity in x, all is undefined, or, with a scale that was
        given, the code of that element alone.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: x has no axis, or ``scale`` another shape or device.
        NoBackwardError: an input requires grad.
    """
    wide, dtype = upcast(x), _quantization.fp8_of(x)
    if scale is not None:
        return _quantization.quantize_by(wide, scale, dtype)
    if x.numel() == 0:
        out = _quantization.scale_of(wide.new_zeros(1), dtype)
    else:
        out = _quantization.scale_of(wide.abs().amax().reshape(1), dtype)
    return _quantization.encode(wide, out, dtype), out


@quantize_fp8_per_tensor.check
def _check(x: Tensor, scale: Tensor | None = None) -> None:
    _quantization.check("quantize_fp8_per_tensor", x)
    if scale is not None:
        _quantization.check_scale("quantize_fp8_per_tensor", scale, x)


@quantize_fp8_per_tensor.debug_check
def _debug_check(x: Tensor, scale: Tensor | None = None) -> None:
    if scale is not None:
        _quantization.check_scale_value("quantize_fp8_per_tensor", scale)


@quantize_fp8_per_tensor.fake
def _fake(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=_quantization.fp8_of(x))
    return codes, x.new_empty(1, dtype=torch.float32)
