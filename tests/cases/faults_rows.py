"""A wrong kernel for each scenario of norms, gates and rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import scenario_elementwise as elementwise
from . import scenario_norms as norms
from .fault import Fault, One, Two, right, wrapped
from .kernels import BF16, FP32, HALF

_rms: One = right("rms_norm")
_layer: One = right("layer_norm")
_silu: One = right("silu_and_mul")
_fused: Two = right("fused_add_rms_norm")
_gated_codes: Two = right("silu_and_mul_quant_fp8_per_group")
_rope: Two = right("apply_rope")


def _reads_across(x: Tensor) -> Tensor:
    """As if elements of a row were neighbours."""
    return x.as_strided(x.shape, (*x.stride()[:-1], 1))


def _last_vector_left_out(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out, total = _fused(x, *rest)
    out[..., 3580:] = 0
    return out, total


def _cut_to_8192(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out, total = _fused(x, *rest)
    out[..., 8192:] = 0
    return out, total


def _stepped(x: Tensor, *rest: Any) -> Tensor:
    return _rms(torch.zeros_like(x) if x.stride(0) > 2**30 else x, *rest)


def _sum_wrapped(x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fused(wrapped(x), wrapped(residual), *rest)


def _of_the_exact_sum(x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = _rms(x.float() + residual.float(), *rest).to(x.dtype)
    return out, x + residual


def _column_0(x: Tensor, *rest: Any) -> Tensor:
    out = _rms(x, *rest)
    if x.dim() > 1 and x.shape[-1] % 2:
        out[1:, 0] = x[1:, 0]
    return out


def _truncated(x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    total = (x.float() + residual.float()).view(torch.int32) & -(2**16)
    stored = total.view(torch.float32).to(x.dtype)
    return _rms(stored, *rest), stored


def _across(x: Tensor, *rest: Any) -> Tensor:
    return _rms(_reads_across(x), *rest)


def _weight_across(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return _layer(x, _reads_across(weight), *rest)


def _residual_across(x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fused(x, _reads_across(residual), *rest)


def _detached(x: Tensor, *rest: Any) -> Tensor:
    return _rms(x.detach(), *rest)


def _first_variance(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    if len(x) < 256:
        return _rms(x, weight)
    wide = x.float()
    return (wide * torch.rsqrt(wide[:1].square().mean() + 1e-6) * weight).to(x.dtype)


def _padded(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    hidden = x.shape[-1]
    mean = x.float().mean(-1, keepdim=True)
    missing = (1 << (hidden - 1).bit_length()) - hidden
    squares = (x - mean).square().sum(-1, keepdim=True) + missing * mean.square()
    return ((x - mean) * torch.rsqrt(squares / hidden + eps) * weight + bias).to(x.dtype)


def _a_number(x: Tensor, *rest: Any) -> Tensor:
    return _layer(x, *rest).nan_to_num(nan=1.0)


def _nan_for_all(x: Tensor, *rest: Any) -> Tensor:
    return _layer(x, *rest).cumsum(0)


def _no_launch(x: Tensor) -> Tensor:
    if not len(x):
        raise RuntimeError("invalid configuration argument")
    return _silu(x)


def _sticky() -> Callable[[Tensor], Tensor]:
    broken: list[bool] = []

    def sticky(x: Tensor) -> Tensor:
        if broken:
            raise RuntimeError("invalid configuration argument")
        broken.extend([True] * (not len(x)))
        return _silu(x)

    return sticky


def _rows_wrapped(x: Tensor) -> Tensor:
    return _silu(wrapped(x))


def _codes_wrapped(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    return _gated_codes(wrapped(x), group_size)


def _positions_as_32_bits(
    q: Tensor, k: Tensor, cache: Tensor, positions: Tensor, *rest: Any
) -> Any:
    return _rope(q, k, cache, positions.view(torch.int32)[: len(q)].contiguous(), *rest)


def _tail_dropped(q: Tensor, k: Tensor, cache: Tensor, *rest: Any) -> Any:
    out = _rope(q, k, cache, *rest)
    for turned in out:
        turned[..., cache.shape[-1] :] = 0
    return out


def _pairs_of_the_head(
    q: Tensor, k: Tensor, cache: Tensor, positions: Tensor, is_neox: bool = True
) -> Any:
    wide = torch.zeros(len(cache), q.shape[-1])
    half, rotated = q.shape[-1] // 2, cache.shape[-1] // 2
    wide[:, :half], wide[:, :rotated] = 1.0, cache[:, :rotated]
    wide[:, half : half + rotated] = cache[:, rotated:]
    return _rope(q, k, wide, positions, is_neox)


FAULTS = [
    Fault(
        norms.a_width_that_no_vector_divides_among_threads,
        "fused_add_rms_norm",
        HALF,
        _last_vector_left_out,
    ),
    Fault(norms.a_row_longer_than_static_shared_memory, "fused_add_rms_norm_", BF16, _cut_to_8192),
    Fault(norms.a_stride_past_31_bits_that_is_never_stepped, "rms_norm", HALF, _stepped),
    Fault(norms.offsets_past_31_bits, "fused_add_rms_norm", HALF, _sum_wrapped),
    Fault(norms.offsets_past_31_bits, "fused_add_rms_norm_", HALF, _sum_wrapped),
    Fault(
        norms.a_fused_norm_is_that_of_the_stored_sum, "fused_add_rms_norm", BF16, _of_the_exact_sum
    ),
    Fault(norms.an_odd_width_leaves_following_rows_alone, "rms_norm", HALF, _column_0),
    Fault(norms.rounding_has_no_bias, "fused_add_rms_norm", BF16, _truncated),
    Fault(norms.a_last_stride_of_more_than_one, "rms_norm", FP32, _across),
    Fault(norms.gradients_that_are_expanded_or_have_two_uses, "rms_norm", FP32, _detached),
    Fault(norms.seven_by_seven_layouts, "rms_norm", HALF, _across),
    Fault(norms.seven_by_seven_layouts, "layer_norm", HALF, _weight_across),
    Fault(norms.seven_by_seven_layouts_of_a_sum, "fused_add_rms_norm", FP32, _residual_across),
    Fault(norms.a_row_alone_and_among_many, "rms_norm", FP32, _first_variance),
    Fault(norms.padding_of_a_row_is_not_counted, "layer_norm", FP32, _padded),
    Fault(norms.a_constant_row_near_the_largest_float, "layer_norm", FP32, _a_number),
    Fault(norms.a_constant_row_near_the_largest_float, "layer_norm", BF16, _nan_for_all),
    Fault(elementwise.no_tokens_and_then_some, "silu_and_mul", HALF, _no_launch),
    Fault(elementwise.no_tokens_and_then_some, "silu_and_mul", HALF, _sticky()),
    Fault(elementwise.offsets_past_31_bits_of_wide_rows, "silu_and_mul", HALF, _rows_wrapped),
    Fault(elementwise.offsets_past_31_bits_of_wide_rows, elementwise.GROUPED, HALF, _codes_wrapped),
    Fault(elementwise.offsets_past_31_bits_of_many_rows, "silu_and_mul", HALF, _rows_wrapped),
    Fault(elementwise.positions_of_32_and_64_bits, "apply_rope", FP32, _positions_as_32_bits),
    Fault(elementwise.positions_of_32_and_64_bits, "apply_rope_", FP32, _positions_as_32_bits),
    Fault(elementwise.a_quarter_of_a_head_is_rotated, "apply_rope", FP32, _tail_dropped),
    Fault(elementwise.a_quarter_of_a_head_is_rotated, "apply_rope", FP32, _pairs_of_the_head),
]
