"""What the quantizations share: the float8 of a device, codes from a scale, checks and fakes."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import checks
from torch_ops.platform import Platform

__all__ = [
    "AMAX_FLOOR",
    "DTYPES",
    "check",
    "check_group",
    "check_norm",
    "check_scale",
    "check_scale_value",
    "empty",
    "encode",
    "fp8_of",
    "largest",
    "quantize_by",
    "quantize_groups",
    "quantize_rows",
    "scale_of",
]

AMAX_FLOOR = 1e-10
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def fp8_of(x: Tensor) -> torch.dtype:
    """Give the float8 dtype of the device of a tensor."""
    if x.device.type != "cuda" or torch.version.hip is None:
        return torch.float8_e4m3fn  # without a probe, which compilers would have to trace
    return Platform.detect(x.device).fp8


def largest(dtype: torch.dtype) -> float:
    """Give the largest code: 448, 240 as fnuz, and 127 as int8, so that codes are symmetric."""
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Give the scale at which the largest magnitude gets the largest code."""
    return amax.clamp(min=AMAX_FLOOR) / largest(dtype)


def encode(wide: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Give the codes nearest to float32 values divided by a scale."""
    limit = largest(dtype)
    scaled = (wide / scale).clamp(-limit, limit)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype)


def quantize_rows(wide: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize float32 ``[..., n]`` to codes of that shape with scales ``[..., 1]``."""
    if wide.shape[-1] == 0:
        amax = wide.new_zeros((*wide.shape[:-1], 1))
    else:
        amax = wide.abs().amax(-1, keepdim=True)
    scale = scale_of(amax, dtype)
    return encode(wide, scale, dtype), scale


def quantize_groups(wide: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize contiguous float32 ``[..., n]`` in groups, with scales ``[..., n / size]``."""
    groups = wide.view(*wide.shape[:-1], wide.shape[-1] // size, size)
    q, scale = quantize_rows(groups, dtype)
    return q.view(wide.shape), scale.squeeze(-1)


def quantize_by(wide: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize float32 values by a scale that is given; gives a copy of it ``[1]``, too."""
    out = scale.reshape(1).clone(memory_format=torch.contiguous_format)
    return encode(wide, out, dtype), out


def check(op: str, x: Tensor) -> None:
    """Refuse anything but ``[..., hidden]`` of float32, float16 or bfloat16."""
    checks.float_dtype(op, "x", x, DTYPES)
    if x.dim() < 1:
        checks.refuse(op, "x", "of shape []", "rank >= 1, [..., hidden]")


def check_norm(
    op: str, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> None:
    """Refuse what a norm that is quantized doesn't take."""
    check(op, x)
    if residual is not None:
        checks.shape(op, "residual", residual, x.shape, "the shape of 'x'")
        checks.like(op, "residual", residual, x, "x")
    checks.vector(op, "weight", weight, x)
    checks.non_negative(op, "eps", eps)


def check_group(op: str, size: int, columns: int, of: str) -> None:
    """Refuse anything but a divisor of the number of columns."""
    if size < 1 or columns % size:
        checks.refuse(op, "group_size", repr(size), f"a divisor of {columns}, {of}")


def check_scale(op: str, scale: Tensor, x: Tensor) -> None:
    """Refuse anything but one float32 on the device of x."""
    checks.float_dtype(op, "scale", scale, (torch.float32,))
    if scale.dim() > 1 or scale.numel() != 1:
        checks.refuse(op, "scale", f"of shape {list(scale.shape)}", "[1] or []")
    if scale.device != x.device:
        checks.refuse(op, "scale", f"on device {scale.device}", f"{x.device}, as 'x'")


def check_scale_value(op: str, scale: Tensor) -> None:
    """Refuse a given scale that isn't a finite normal number above 0; reads it."""
    value = float(scale)
    if not torch.finfo(torch.float32).tiny <= value < float("inf"):
        checks.refuse(op, "scale", repr(value), "a finite normal number > 0")


def empty(x: Tensor, dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor]:
    """Give empty codes of the shape of x, and empty scales ``[..., width]``."""
    codes = x.new_empty(x.shape, dtype=dtype)
    return codes, x.new_empty((*x.shape[:-1], width), dtype=torch.float32)
