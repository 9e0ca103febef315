"""Rotary embedding of queries and keys in one launch, into new tensors or in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ._launch import (
    INTERPRETED,
    INTERPRETED_TILE,
    Launch,
    Variant,
    device_function,
    kernel,
    remember,
)
from ._rows import lane_of, power_of_two

__all__ = ["config", "rotate", "rotate_in_place", "tile", "turn", "walkable"]

_FEW = 128  # tokens


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


@device_function
def turn(
    x: tl.tensor, x_at: tl.tensor, y: tl.tensor, y_at: tl.tensor, y_column: tl.tensor,
    exists: tl.tensor, written: tl.tensor, copied: tl.tensor, cache: tl.tensor,
    positions: tl.tensor, token: tl.tensor, tokens: tl.tensor, half: tl.tensor, tail: tl.tensor,
    cache_row: tl.tensor, cache_rows: tl.tensor,
    NEOX: tl.constexpr, STRIDED: tl.constexpr, HALF: tl.constexpr, TAIL: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate heads that exist where they are to be written, and copy a tail where it is asked for.

    Elements of what is written are y_column apart if it is STRIDED.
    """
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    column = y_column if STRIDED else 1
    if HALF > 0:
        cols = tl.arange(0, HALF)[None, None, :]
        if NEOX:
            inside = cols < half
            a = tl.load(x + x_at + cols, exists & inside, other=0.0)
            b = tl.load(x + x_at + half + cols, exists & inside, other=0.0)
        else:
            both = tl.arange(0, HALF * 2)[None, None, :]
            inside = both < half * 2
            pairs = tl.load(x + x_at + both, exists & inside, other=0.0)
            a, b = tl.split(tl.reshape(pairs, [TOKENS, HEADS, HALF, 2]))
        position = tl.load(positions + token, token < tokens, other=0).to(tl.int64)
        known = (position >= 0) & (position < cache_rows)
        cos, sin = _angles(cache, position * cache_row, known, half, cols, wide)
        a, b = a.to(wide), b.to(wide)
        left = (a * cos - b * sin).to(y.dtype.element_ty)
        right = (b * cos + a * sin).to(y.dtype.element_ty)
        if NEOX:
            tl.store(y + y_at + cols * column, left, written & inside)
            tl.store(y + y_at + (half + cols) * column, right, written & inside)
        else:
            pairs = tl.reshape(tl.join(left, right), [TOKENS, HEADS, HALF * 2])
            tl.store(y + y_at + both * column, pairs, written & inside)
    if TAIL > 0:
        cols = tl.arange(0, TAIL)[None, None, :]
        rest = tl.load(x + x_at + half * 2 + cols, copied & (cols < tail), other=0.0)
        tl.store(y + y_at + (half * 2 + cols) * column, rest, copied & (cols < tail))


@kernel(unaligned=("positions",))
def _rotate(
    q: tl.tensor, k: tl.tensor, q_out: tl.tensor, k_out: tl.tensor,
    cache: tl.tensor, positions: tl.tensor,
    tokens: tl.int64, q_heads: tl.int32, k_heads: tl.int32, half_lanes: tl.int32,
    tail_lanes: tl.int32, q_token: tl.int64, q_head: tl.int64, k_token: tl.int64,
    k_head: tl.int64, cache_row: tl.int64, cache_rows: tl.int64,
    NEOX: tl.constexpr, IN_PLACE: tl.constexpr, LANE: tl.constexpr, CACHE_LANE: tl.constexpr,
    HALF: tl.constexpr, TAIL: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate HEADS heads, of queries or of keys, of TOKENS tokens; copy what isn't rotated."""
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
    turn(
        x, x_at, y, y_at, 1, exists, exists, exists, cache, positions, token, tokens, half,
        tail_lanes * LANE, cache_row * CACHE_LANE, cache_rows,
        NEOX, False, HALF, TAIL, TOKENS, HEADS,
    )  # fmt: skip


class Config(NamedTuple):
    """How tokens and heads are grouped into tiles.

    Attributes:
        tokens: Tokens of a tile.
        heads: Heads of a tile.
        threads: Threads of one program.
    """

    tokens: int
    heads: int
    threads: int


def config(half: int, itemsize: int, heads: int) -> Config:
    """Choose by the padded half of rotary_dim: for the interpreter, or where keys are appended."""
    wanted = INTERPRETED_TILE if INTERPRETED else 1024 // itemsize
    count = min(power_of_two(heads), max(1, wanted // half))
    tokens = max(1, wanted // half // count)
    return Config(tokens, count, min(max(tokens * count * half * itemsize // 16, 32), 256))


def tile(half: int, itemsize: int, heads: int, few: bool) -> Config:
    """Choose by the padded half of rotary_dim, the larger number of heads, and few tokens or many.

    Measured on an H200 in bfloat16 for heads of 128: 16 tokens of 32 + 8 heads take 4.7 us in tiles
    of 4 tokens and 2 heads, 5.1 in those of a token and 8 heads; of 64 + 8 heads 4.8 and 5.8. Of
    32 + 8 heads 1024 tokens take 9.9 us in tiles of 4 tokens and 8 heads, and 11.2 (a copy 10.3);
    65536 take 327 and 324 (320). Of 128 + 1 heads of 64, 65536 take 508 and 538 us (514).
    """
    if INTERPRETED:
        return config(half, itemsize, heads)
    room = max(1, (1024 if few else 4096) // itemsize // half)
    count = min(power_of_two(heads), max(2, room // 4) if few else min(room, 8))
    tokens = max(1, min(room // count, 4))
    return Config(tokens, count, min(max(tokens * count * half * itemsize // 16, 32), 128))


class _Plan(NamedTuple):
    variant: Variant
    tokens: int
    heads: int


_plans: dict[Any, _Plan] = {}
_launches: dict[Any, Launch] = {}


def rotate(
    q: Tensor, k: Tensor, cache: Tensor, positions: Tensor, is_neox: bool
) -> tuple[Tensor, Tensor]:
    """Give rotated queries and keys."""
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_out = torch.empty_like(k, memory_format=torch.contiguous_format)
    _run(q, k, q_out, k_out, cache, positions, is_neox, False)
    return q_out, k_out


def rotate_in_place(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor, is_neox: bool) -> None:
    """Rotate queries and keys where they are."""
    _run(q, k, q, k, cache, positions, is_neox, True)


def _run(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, cache: Tensor, positions: Tensor,
    is_neox: bool, in_place: bool,
) -> None:  # fmt: skip
    """Repeat a launch that was made for such arguments, or find out which to make."""
    key = (
        q.dtype, positions.dtype, q.shape, k.shape, cache.shape, q.stride(), k.stride(),
        cache.stride(), positions.stride(), is_neox, in_place, q.get_device(),
    )  # fmt: skip
    known = _launches.get(key)
    if known is not None and (known.lane == 1 or _aligned(q, k, cache)):
        known.variant(known.programs, (q, k, q_out, k_out, cache, positions), known.numbers)
    elif (q.numel() or k.numel()) and (cache.shape[1] or not in_place):
        made = _find(q, k, q_out, k_out, cache, positions, is_neox, in_place)
        if made is not None and (made.lane > 1 or _aligned(q, k, cache)):
            remember(_launches, key, made)


def _aligned(q: Tensor, k: Tensor, cache: Tensor) -> bool:
    return (q.data_ptr() | k.data_ptr() | cache.data_ptr()) % 16 == 0


def _find(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, cache: Tensor, positions: Tensor,
    is_neox: bool, in_place: bool,
) -> Launch | None:  # fmt: skip
    """Copy what the kernel can't walk, launch, and give the launch if it can be repeated."""
    given = (q, k, cache, positions)
    q, k = walkable(q), walkable(k)
    cache = cache if cache.stride(1) == 1 else cache.contiguous()
    positions = positions.contiguous()
    if in_place:
        q_out, k_out = q, k
    launch = _launch(q, k, cache, positions, is_neox, in_place)
    launch.variant(launch.programs, (q, k, q_out, k_out, cache, positions), launch.numbers)
    walked = (q, k, cache, positions)
    if in_place:
        for mine, theirs in zip(walked[:2], given[:2], strict=True):
            if mine is not theirs:
                theirs.copy_(mine)
    same = all(mine is theirs for mine, theirs in zip(walked, given, strict=True))
    return launch if same else None


def walkable(x: Tensor) -> Tensor:
    """Copy a tensor whose heads aren't stored element by element."""
    return x if x.stride(2) == 1 else x.clone(memory_format=torch.contiguous_format)


def _launch(
    q: Tensor, k: Tensor, cache: Tensor, positions: Tensor, is_neox: bool, in_place: bool
) -> Launch:
    """Describe the launch for tensors that the kernel can walk."""
    tokens, q_heads, size = q.shape
    k_heads, rotary = k.shape[1], cache.shape[1]
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
    lane = _lane(q, k, cache, rotary // 2, size - rotary, strides)
    cache_lane = 4 if lane > 1 else 1
    heads = power_of_two(max(q_heads, k_heads))
    key = (
        q.dtype, positions.dtype, rotary, size, heads, tokens <= _FEW, lane, is_neox, in_place,
        q.get_device(),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.setdefault(key, _plan(q, rotary, heads, lane, is_neox, in_place))
    blocks = -(-q_heads // plan.heads) - (-k_heads // plan.heads)
    numbers = (
        tokens, q_heads, k_heads, rotary // 2 // lane, (size - rotary) // lane,
        *(stride // lane for stride in strides), cache.stride(0) // cache_lane, cache.shape[0],
    )  # fmt: skip
    return Launch(plan.variant, -(-tokens // plan.tokens) * blocks, numbers, lane)


def _lane(
    q: Tensor, k: Tensor, cache: Tensor, half: int, tail: int, strides: tuple[int, ...]
) -> int:
    """Give how many elements a thread accesses at once: 1 unless everything is aligned."""
    lane = lane_of(half, q.element_size())
    if lane == 1 or tail % lane or cache.stride(0) % 4 or any(stride % lane for stride in strides):
        return 1
    aligned = (q.data_ptr() | k.data_ptr() | cache.data_ptr()) % 16 == 0
    return lane if aligned else 1


def _plan(q: Tensor, rotary: int, heads: int, lane: int, is_neox: bool, in_place: bool) -> _Plan:
    half = power_of_two(rotary // 2) if rotary else 0
    tail = 0 if in_place or q.shape[2] == rotary else power_of_two(q.shape[2] - rotary)
    few = q.shape[0] <= _FEW
    chosen = tile(max(half, tail // 2, 1), q.element_size(), heads, few)
    constants = (
        is_neox, in_place, lane, 4 if lane > 1 else 1, half, tail, chosen.tokens, chosen.heads,
    )  # fmt: skip
    variant = _rotate.variant(constants, chosen.threads, q.get_device(), aligned=lane > 1)
    return _Plan(variant, chosen.tokens, chosen.heads)
