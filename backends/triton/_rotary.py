"""Rotary embedding of queries and keys in one launch, into new tensors or in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ._launch import INTERPRETED, INTERPRETED_TILE, Variant, device_function, kernel
from ._rows import lane_of, power_of_two

__all__ = ["rotate", "rotate_in_place"]


@device_function
def _angles(
    cache: tl.tensor,
    position: tl.tensor,
    known: tl.tensor,
    half: tl.tensor,
    cols: tl.tensor,
    wide: tl.constexpr,
) -> tl.tensor:
    """Load cosines and sines; NaN for a position that the cache doesn't have."""
    mask = known & (cols < half)
    cos = tl.load(cache + position + cols, mask, other=float("nan"), eviction_policy="evict_last")
    sin = tl.load(
        cache + position + half + cols, mask, other=float("nan"), eviction_policy="evict_last"
    )
    return cos.to(wide), sin.to(wide)


@kernel(unaligned=("positions",))
def _rotate(
    q: tl.tensor, k: tl.tensor, q_out: tl.tensor, k_out: tl.tensor,
    cache: tl.tensor, positions: tl.tensor,
    tokens: tl.int64, q_heads: tl.int32, k_heads: tl.int32, half_lanes: tl.int32,
    tail_lanes: tl.int32, q_token: tl.int64, q_head: tl.int64, k_token: tl.int64,
    k_head: tl.int64, cache_row: tl.int64, cache_rows: tl.int64,
    NEOX: tl.constexpr, IN_PLACE: tl.constexpr, LANE: tl.constexpr, CACHE_LANE: tl.constexpr,
    HALF: tl.constexpr, TAIL: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    LOAD: tl.constexpr, STORE: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate HEADS heads, of queries or of keys, of TOKENS tokens; copy what isn't rotated."""
    wide: tl.constexpr = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    half = half_lanes * LANE
    size = (half_lanes * 2 + tail_lanes) * LANE
    q_blocks = tl.cdiv(q_heads, HEADS)
    blocks = q_blocks + tl.cdiv(k_heads, HEADS)
    block = tl.program_id(0) % blocks
    is_q = block < q_blocks
    x = q if is_q else k
    y = q_out if is_q else k_out
    heads = q_heads if is_q else k_heads
    x_token = (q_token if is_q else k_token) * LANE
    x_head = (q_head if is_q else k_head) * LANE
    first = (block if is_q else block - q_blocks) * HEADS
    token = (tl.program_id(0) // blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    token = token[:, None, None]
    head = first + tl.arange(0, HEADS)[None, :, None]
    exists = (token < tokens) & (head < heads)
    x_at = token * x_token + head * x_head
    y_at = x_at if IN_PLACE else (token * heads + head) * size
    if HALF > 0:
        cols = tl.arange(0, HALF)[None, None, :]
        if NEOX:
            mask = exists & (cols < half)
            a = tl.load(x + x_at + cols, mask, other=0.0, eviction_policy=LOAD)
            b = tl.load(x + x_at + half + cols, mask, other=0.0, eviction_policy=LOAD)
        else:
            both = tl.arange(0, HALF * 2)[None, None, :]
            mask = exists & (both < half * 2)
            pairs = tl.load(x + x_at + both, mask, other=0.0, eviction_policy=LOAD)
            a, b = tl.split(tl.reshape(pairs, [TOKENS, HEADS, HALF, 2]))
        position = tl.load(positions + token, token < tokens, other=0).to(tl.int64)
        known = (position >= 0) & (position < cache_rows)
        cos, sin = _angles(cache, position * cache_row * CACHE_LANE, known, half, cols, wide)
        a, b = a.to(wide), b.to(wide)
        left = (a * cos - b * sin).to(y.dtype.element_ty)
        right = (b * cos + a * sin).to(y.dtype.element_ty)
        if NEOX:
            tl.store(y + y_at + cols, left, mask, eviction_policy=STORE)
            tl.store(y + y_at + half + cols, right, mask, eviction_policy=STORE)
        else:
            pairs = tl.reshape(tl.join(left, right), [TOKENS, HEADS, HALF * 2])
            tl.store(y + y_at + both, pairs, mask, eviction_policy=STORE)
    if TAIL > 0:
        cols = tl.arange(0, TAIL)[None, None, :]
        mask = exists & (cols < tail_lanes * LANE)
        rest = tl.load(x + x_at + half * 2 + cols, mask, other=0.0, eviction_policy=LOAD)
        tl.store(y + y_at + half * 2 + cols, rest, mask, eviction_policy=STORE)


class Config(NamedTuple):
    """How tokens and heads are grouped into tiles.

    Attributes:
        tokens: Tokens of a tile.
        heads: Heads of a tile.
        threads: Threads of one program.
        load, store: Eviction policies.
    """

    tokens: int
    heads: int
    threads: int
    load: str = ""
    store: str = ""


def config(half: int, itemsize: int, heads: int, crowded: bool) -> Config:
    """Choose by the padded half of rotary_dim and the larger number of heads."""
    wanted = INTERPRETED_TILE if INTERPRETED else (1024 if crowded else 512) // itemsize
    count = min(power_of_two(heads), max(1, wanted // half))
    tokens = max(1, wanted // half // count) if INTERPRETED else 1
    return Config(tokens, count, min(max(count * half * itemsize // 16, 32), 256))


_CROWD = 512


class _Plan(NamedTuple):
    variant: Variant
    tokens: int
    heads: int


_plans: dict[Any, _Plan] = {}


def rotate(
    q: Tensor, k: Tensor, cache: Tensor, positions: Tensor, is_neox: bool
) -> tuple[Tensor, Tensor]:
    """Give rotated queries and keys."""
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_out = torch.empty_like(k, memory_format=torch.contiguous_format)
    _run(_walkable(q), _walkable(k), q_out, k_out, cache, positions, is_neox, False)
    return q_out, k_out


def rotate_in_place(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor, is_neox: bool) -> None:
    """Rotate queries and keys where they are."""
    x, y = _walkable(q), _walkable(k)
    _run(x, y, x, y, cache, positions, is_neox, True)
    if x is not q:
        q.copy_(x)
    if y is not k:
        k.copy_(y)


def _walkable(x: Tensor) -> Tensor:
    """Copy a tensor whose heads aren't stored element by element."""
    return x if x.stride(2) == 1 else x.clone(memory_format=torch.contiguous_format)


def _run(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, cache: Tensor, positions: Tensor,
    is_neox: bool, in_place: bool,
) -> None:  # fmt: skip
    tokens, q_heads, size = q.shape
    k_heads = k.shape[1]
    rotary = cache.shape[1]
    if not (q.numel() or k.numel()) or (in_place and not rotary):
        return
    if cache.stride(1) != 1:
        cache = cache.contiguous()
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
    lane = _lane(q, k, cache, rotary // 2, size - rotary, strides)
    cache_lane = 4 if lane > 1 else 1
    key = (
        q.dtype, positions.dtype, rotary, size, q_heads, k_heads, tokens > _CROWD, lane, is_neox,
        in_place, q.get_device(),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.setdefault(key, _plan(q, k, rotary, tokens > _CROWD, lane, is_neox, in_place))
    blocks = -(-q_heads // plan.heads) - (-k_heads // plan.heads)
    plan.variant(
        -(-tokens // plan.tokens) * blocks,
        (q, k, q_out, k_out, cache, positions.contiguous()),
        (
            tokens, q_heads, k_heads, rotary // 2 // lane, (size - rotary) // lane,
            *(stride // lane for stride in strides), cache.stride(0) // cache_lane, cache.shape[0],
        ),
    )  # fmt: skip


def _lane(
    q: Tensor, k: Tensor, cache: Tensor, half: int, tail: int, strides: tuple[int, ...]
) -> int:
    """Give how many elements a thread accesses at once: 1 unless everything is aligned."""
    lane = lane_of(half, q.element_size())
    if lane == 1 or tail % lane or cache.stride(0) % 4 or any(stride % lane for stride in strides):
        return 1
    aligned = (q.data_ptr() | k.data_ptr() | cache.data_ptr()) % 16 == 0
    return lane if aligned else 1


def _plan(
    q: Tensor, k: Tensor, rotary: int, crowded: bool, lane: int, is_neox: bool, in_place: bool
) -> _Plan:
    half = power_of_two(rotary // 2) if rotary else 0
    tail = 0 if in_place or q.shape[2] == rotary else power_of_two(q.shape[2] - rotary)
    heads = max(q.shape[1], k.shape[1])
    chosen = config(max(half, tail // 2, 1), q.element_size(), heads, crowded)
    constants = (
        is_neox, in_place, lane, 4 if lane > 1 else 1, half, tail, chosen.tokens, chosen.heads,
        chosen.load, chosen.store,
    )  # fmt: skip
    variant = _rotate.variant(constants, chosen.threads, q.get_device(), aligned=lane > 1)
    return _Plan(variant, chosen.tokens, chosen.heads)
