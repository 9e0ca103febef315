"""Attention in Triton: which kernel, which tile sizes, and the launch."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops.platform import Platform

from ._attention_hopper import LongVariant, fits
from ._attention_kernel import attend
from ._launch import INTERPRETED, Variant
from ._rows import power_of_two

__all__ = ["Config", "config", "forward", "refusal", "shared_memory"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LONGEST = 256
_SCALES = 2.0**100
_LOG2_E = math.log2(math.e)
_BYTES = 16
_SMALL_WEIGHTS = 14.0  # 2**14 is the largest power of 2 with room for its neighbours in float16
_variants: dict[Any, Variant] = {}


class Config(NamedTuple):
    """Tile sizes of a kernel.

    Attributes:
        block_m: Rows of a program.
        block_n: Keys of a step.
        warps: Warps of a program.
        stages: Steps whose keys and values are in flight.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


def refusal(dtype: torch.dtype, head_dim: int, value_dim: int, scale: float | None) -> str | None:
    """Give why heads like these can't be served, or None."""
    if dtype not in _DTYPES:
        return f"dtype {dtype} (supported: {', '.join(map(str, _DTYPES))})"
    if INTERPRETED and dtype == torch.bfloat16:
        return (
            "torch.bfloat16 is untestable in Triton's interpreter, which truncates where a GPU "
            "rounds (supported there: torch.float16, torch.float32)"
        )
    for name, width in (("head_dim", head_dim), ("head_dim of values", value_dim)):
        if not 1 <= width <= _LONGEST:
            return f"{name} {width} (supported: 1 to {_LONGEST})"
    if scale and not 1 / _SCALES <= abs(scale) <= _SCALES:
        return f"scale {scale} (supported: 0, and magnitudes from 2**-100 to 2**100)"
    return None


def shared_memory(arch: str | None) -> int:
    """Give how many bytes of shared memory a program may have."""
    if arch is not None and arch.startswith("gfx"):
        return 163840 if arch == "gfx950" else 65536
    if arch in (None, "sm_90", "sm_100", "sm_103"):
        return 232448
    if arch in ("sm_80", "sm_87"):
        return 163840
    return 101376


def config(arch: str | None, itemsize: int, width: int, rows: int) -> Config:
    """Choose tile sizes.

    Args:
        arch: ``"sm_90"``, ``"gfx942"``, None for the interpreter.
        itemsize: Bytes of an element.
        width: Padded length of a head, the longer one of keys' and values'.
        rows: Rows of one head slot.
    """
    if itemsize == 4:
        return Config(32 if width <= 128 else 16, 32, 4, 1)
    few = next((tile for tile in (16, 32, 64) if rows <= tile), 0)
    if arch is not None and arch.startswith("gfx"):
        return Config(few or (128 if width <= 128 else 64), 64 if width <= 128 else 32, 4, 1)
    if few:
        wanted = Config(few, 128 if few == 16 and width <= 128 else 64, 4, 3)
    elif width <= 64:
        wanted = Config(128, 64, 4, 3)
    else:
        wanted = Config(128, 64, 8, 3 if width <= 128 else 2)
    return _fitted(wanted, itemsize * width, shared_memory(arch))


def _fitted(wanted: Config, row_bytes: int, limit: int) -> Config:
    """Take away stages, then keys, then rows, until all of them fit into shared memory."""
    chosen = wanted
    while (chosen.block_m + 2 * chosen.stages * chosen.block_n) * row_bytes > limit - 1024:
        if chosen.stages > 1:
            chosen = chosen._replace(stages=chosen.stages - 1)
        elif chosen.block_n > 32:
            chosen = chosen._replace(block_n=chosen.block_n // 2)
        else:
            chosen = chosen._replace(block_m=chosen.block_m // 2)
    return chosen


class _Problem(NamedTuple):
    """What a variant is compiled for; lengths and strides are none of it."""

    dtype: torch.dtype
    head_dim: int
    value_dim: int
    pack: int
    rows: int
    is_causal: bool
    windowed: bool
    capped: bool
    with_lse: bool
    lane: int
    wide: bool
    device: int


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    window_left: int,
    logits_soft_cap: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attend; gives the output and, if wanted, the LSE."""
    batch, queries, heads, head_dim = q.shape
    _, keys, kv_heads, value_dim = v.shape
    out = q.new_empty((batch, queries, heads, value_dim))
    lse = q.new_empty((batch, queries, heads), dtype=torch.float32) if with_lse else None
    if not out.numel():
        return out, lse
    if not keys:
        return out.zero_(), None if lse is None else lse.fill_(-math.inf)
    factor = head_dim**-0.5 if scale is None else scale
    if factor <= 0:  # a maximum of logits, scaled, is that of scaled logits for positive ones alone
        q, factor = (-q, -factor) if factor else (q * 0, 1.0)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    group = heads // kv_heads
    pack = group if queries * group <= 64 else 1
    strides = [_stride(t, dim) for t in (q, k, v) for dim in range(3)]
    lane = _lane(q, k, v, strides)
    window = window_left if window_left < keys else -1
    if fits(q, v, lane, strides, logits_soft_cap > 0):
        flags = (is_causal, window >= 0, with_lse, _shift(q.dtype))
        _long(q.dtype, flags, head_dim, q.get_device())(
            q, k, v, out, lse, factor * _LOG2_E, window
        )
        return out, lse
    problem = _Problem(
        q.dtype, head_dim, value_dim, pack, min(queries * pack, 65), is_causal,
        window >= 0, logits_soft_cap > 0, with_lse, lane,
        max(strides) >= 2**24, q.get_device(),
    )  # fmt: skip
    variant = _variants.get(problem) or _variants.setdefault(problem, _variant(problem))
    block_m = variant.constants[-5]
    slots = batch * heads // pack
    factor *= 2 * _LOG2_E / logits_soft_cap if logits_soft_cap > 0 else _LOG2_E
    variant(
        -(-queries * pack // block_m) * slots,
        (q, k, v, out, lse),
        (
            factor, logits_soft_cap * _LOG2_E, window, queries, keys,
            slots, heads // pack, group // pack, *[stride // lane for stride in strides],
        ),
    )  # fmt: skip
    return out, lse


def _stride(t: Tensor, dim: int) -> int:
    return t.stride(dim) if t.shape[dim] > 1 else 0  # that of a single element may be anything


def _shift(dtype: torch.dtype) -> float:
    return _SMALL_WEIGHTS if dtype == torch.float16 else 0.0


@functools.cache
def _long(
    dtype: torch.dtype, flags: tuple[bool | float, ...], head_dim: int, device: int
) -> LongVariant:
    return LongVariant(dtype, flags, max(64, power_of_two(head_dim)), device)


def _lane(q: Tensor, k: Tensor, v: Tensor, strides: list[int]) -> int:
    """Give how many elements are 16 bytes if all heads start at multiples of that, or else 1."""
    lane = _BYTES // q.element_size()
    if any(stride % lane for stride in strides):
        return 1
    return 1 if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % _BYTES else lane


def _variant(problem: _Problem) -> Variant:
    arch = None if problem.device < 0 else Platform.detect(f"cuda:{problem.device}").arch
    block_d, block_v = (max(16, power_of_two(w)) for w in (problem.head_dim, problem.value_dim))
    chosen = config(arch, problem.dtype.itemsize, max(block_d, block_v), problem.rows)
    constants = (
        problem.is_causal, problem.windowed, problem.capped, problem.with_lse,
        _shift(problem.dtype),
        problem.pack, problem.head_dim, problem.value_dim, problem.lane, problem.wide, False,
        chosen.block_m, chosen.block_n, block_d, block_v, chosen.stages,
    )  # fmt: skip
    warp = 64 if torch.version.hip else 32
    return attend.variant(
        constants,
        chosen.warps * warp,
        problem.device,
        aligned=problem.lane > 1,
        options={"enable_fp_fusion": True, "num_stages": chosen.stages},
    )
