"""sgl-kernel's sgl_per_token_group_quant_8bit_v2."""

import torch
from torch import Tensor

from torch_ops import limits
from torch_ops.declarations._quantization import AMAX_FLOOR, empty, largest

from . import _library

__all__ = ["quantize_fp8_per_group", "supports"]

_SIZES = (16, 32, 64, 128)
_OFFSETS = 2**31
_CODES = torch.float8_e4m3fn
_WIDE = torch.bfloat16


def supports(x: Tensor, group_size: int = 128) -> str | None:
    if x.dtype != torch.float16:
        text = limits.unsupported("x", x, (torch.float16,))
        return f"{text}; magnitudes from 2**126 get codes of 0" if x.dtype == _WIDE else text
    if group_size not in _SIZES:
        return f"group_size {group_size} (supported: {', '.join(map(str, _SIZES))})"
    if x.numel() == 0:
        return None
    if not x.is_contiguous():
        return limits.strides("x", x, "contiguous")
    if x.data_ptr() % 16:
        return limits.misaligned("x", x, "16")
    if x.numel() > _OFFSETS:
        limit = f"(supported: up to {_OFFSETS}, offsets are 32 bits wide)"
        return f"x of {x.numel()} elements {limit}"
    return None


def quantize_fp8_per_group(x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
    q, scale = empty(x, _CODES, x.shape[-1] // group_size)
    if x.numel():
        index, limit = x.get_device(), largest(_CODES)
        args = (
            limits.rows(x), limits.rows(q), limits.rows(scale), group_size, AMAX_FLOOR,
            -limit, limit, False, False, None,
        )  # fmt: skip
        # It launches on the current device, whichever the tensors are on.
        if index < 0 or index == torch.cuda.current_device():
            _library.operator("sgl_per_token_group_quant_8bit_v2")(*args)
        else:
            with torch.cuda.device(index):
                _library.operator("sgl_per_token_group_quant_8bit_v2")(*args)
    return q, scale
