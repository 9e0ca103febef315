"""A wrong kernel for each scenario of quantizations."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.declarations._quantization import largest

from . import scenario_quantization as quantization
from .fault import Fault, Two, right, wrapped
from .kernels import BF16, FP32, HALF

Pair = tuple[Tensor, Tensor]
_fp8: Two = right("quantize_fp8_per_token")
_int8: Two = right("quantize_int8_per_token")


def _one_row_for_none(x: Tensor) -> Pair:
    q, scale = _fp8(x)
    return (q, scale) if q.numel() else (q.new_zeros(1, 128), scale)


def _no_floor(x: Tensor) -> Pair:
    size = x.float().abs().amax(-1, keepdim=True)
    return _fp8(x)[0], size / 448


def _floor_of_layout(x: Tensor) -> Pair:
    """Another floor where rows aren't side by side."""
    q, scale = _fp8(x)
    return q, scale if x.is_contiguous() else scale.clamp(min=1e-10)


def _saturates_from_256(x: Tensor) -> Pair:
    q, scale = _fp8(x)
    wide = q.float()
    return torch.where(wide.abs() >= 256, 448 * wide.sign(), wide).to(q.dtype), scale


def _other_flavor(x: Tensor) -> Pair:
    """Codes of one flavor whose bytes are named the other."""
    q, scale = _fp8(x)
    other = q.float().to(torch.float8_e4m3fnuz)
    return other.view(torch.uint8).view(q.dtype), scale


def _rows_wrapped(x: Tensor) -> Pair:
    return _fp8(wrapped(x))


def _int8_rows_wrapped(x: Tensor) -> Pair:
    return _int8(wrapped(x))


def _rounded(x: Tensor, shift: float) -> Pair:
    size = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-10)
    scale = size / largest(torch.int8)
    quotient = x.float() / scale
    away = (quotient.abs() + shift).floor() * quotient.sign()
    return away.clamp(-128, 127).to(torch.int8), scale


def _half_away(x: Tensor) -> Pair:
    return _rounded(x, 0.5)


def _to_minus_128(x: Tensor) -> Pair:
    q, scale = _int8(x)
    return torch.where(q == -127, q - 1, q), scale


FAULTS = [
    Fault(quantization.no_tokens_and_then_some, "quantize_fp8_per_token", HALF, _one_row_for_none),
    Fault(quantization.zeros_have_one_finite_scale, "quantize_fp8_per_token", FP32, _no_floor),
    Fault(
        quantization.zeros_have_one_finite_scale, "quantize_fp8_per_token", BF16, _floor_of_layout
    ),
    Fault(
        quantization.codes_are_nearest_and_reach_the_largest,
        "quantize_fp8_per_token",
        HALF,
        _saturates_from_256,
    ),
    Fault(
        quantization.bytes_are_of_the_dtype_that_names_them,
        "quantize_fp8_per_token",
        FP32,
        _other_flavor,
    ),
    Fault(quantization.offsets_past_31_bits, "quantize_fp8_per_token", HALF, _rows_wrapped),
    Fault(quantization.offsets_past_31_bits, "quantize_int8_per_token", HALF, _int8_rows_wrapped),
    Fault(quantization.whole_numbers_are_symmetric, "quantize_int8_per_token", BF16, _to_minus_128),
    Fault(quantization.halves_go_to_even, "quantize_int8_per_token", HALF, _half_away),
]
