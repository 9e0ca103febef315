"""Rotates queries in place, and keys on their way into a paged cache, in one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor

from ._launch import Launch, Variant, device_function, kernel, remember
from ._paged_append import copy
from ._pages import lane_of_steps
from ._rotary import config, turn, walkable
from ._rows import lane_of, power_of_two

__all__ = ["rotate_and_append"]

_BYTES = 16


@device_function
def _copy_values(
    v: tl.tensor, v_cache: tl.tensor, slot_mapping: tl.tensor, first_token: tl.tensor,
    first_head: tl.tensor, tokens: tl.tensor, heads: tl.tensor, slots: tl.tensor,
    v_token: tl.tensor, v_head: tl.tensor, v_column: tl.tensor,
    page: tl.tensor, row: tl.tensor, head_step: tl.tensor, column: tl.tensor,
    LANE: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """Copy HEADS heads of the values of TOKENS tokens to their slots."""
    number = tl.arange(0, TOKENS * HEADS)
    token, head = first_token + number // HEADS, first_head + number % HEADS
    exists = (token < tokens) & (head < heads)
    slot = tl.load(slot_mapping + token, mask=exists, other=-1)
    inside = (slot >= 0) & (slot < slots)
    slot = tl.where(inside, slot, 0)
    source = token * v_token + head * v_head
    target = slot // PAGE * page + slot % PAGE * row + head * head_step
    copy(v, v_cache, source, target, inside, v_column, column, WIDTH, BLOCK_W, LANE)


@kernel(unaligned=("positions", "slot_mapping"))
def _rotate_and_append(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor,
    cache: tl.tensor, positions: tl.tensor, slot_mapping: tl.tensor,
    tokens: tl.int64, q_heads: tl.int32, k_heads: tl.int32, slots: tl.int64,
    half_lanes: tl.int32, tail_lanes: tl.int32, cache_row: tl.int64, cache_rows: tl.int64,
    q_token: tl.int64, q_head: tl.int64, k_token: tl.int64, k_head: tl.int64,
    v_token: tl.int64, v_head: tl.int64, v_column: tl.int64,
    kc_page: tl.int64, kc_row: tl.int64, kc_head: tl.int64, kc_column: tl.int64,
    vc_page: tl.int64, vc_row: tl.int64, vc_head: tl.int64, vc_column: tl.int64,
    NEOX: tl.constexpr, LANE: tl.constexpr, CACHE_LANE: tl.constexpr, PAGE: tl.constexpr,
    HALF: tl.constexpr, TAIL: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_V: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """Take HEADS heads of TOKENS tokens: of queries, of keys, or of values, which are copied.

    A slot that is negative or past the last skips its token. Strides are in lanes; those of columns
    are used where LANE is 1.
    """
    q_blocks, k_blocks = tl.cdiv(q_heads, HEADS), tl.cdiv(k_heads, HEADS)
    blocks = q_blocks + k_blocks * 2
    block = tl.program_id(0) % blocks
    first = (tl.program_id(0) // blocks).to(tl.int64) * TOKENS
    if block >= q_blocks + k_blocks:
        _copy_values(
            v, v_cache, slot_mapping, first, (block - q_blocks - k_blocks) * HEADS, tokens, k_heads,
            slots, v_token * LANE, v_head * LANE, v_column, vc_page * LANE, vc_row * LANE,
            vc_head * LANE, vc_column, LANE, PAGE, WIDTH_V, BLOCK_V, TOKENS, HEADS,
        )  # fmt: skip
    else:
        is_q = block < q_blocks
        token = (first + tl.arange(0, TOKENS))[:, None, None]
        head = (block if is_q else block - q_blocks) * HEADS + tl.arange(0, HEADS)[None, :, None]
        exists = (token < tokens) & (head < (q_heads if is_q else k_heads))
        # Queries have no slot: theirs is -1, and the lowest one that is written.
        slot = tl.load(slot_mapping + token, mask=token < tl.where(is_q, 0, tokens), other=-1)
        written = exists & (slot >= tl.where(is_q, -1, 0)) & (slot < slots)
        inside = (slot >= 0) & (slot < slots)
        slot = tl.where(inside, slot, 0)
        x_at = token * ((q_token if is_q else k_token) * LANE)
        x_at += head * ((q_head if is_q else k_head) * LANE)
        y_at = tl.where(is_q, token, slot // PAGE) * ((q_token if is_q else kc_page) * LANE)
        y_at += slot % PAGE * (kc_row * LANE) + head * ((q_head if is_q else kc_head) * LANE)
        turn(
            q if is_q else k, x_at, q if is_q else k_cache, y_at, tl.where(is_q, 1, kc_column),
            exists, written, exists & inside, cache, positions, token, tokens, half_lanes * LANE,
            tail_lanes * LANE, cache_row * CACHE_LANE, cache_rows,
            NEOX, LANE == 1, HALF, TAIL, TOKENS, HEADS,
        )  # fmt: skip


class _Plan(NamedTuple):
    variant: Variant
    tokens: int
    heads: int


_plans: dict[Any, _Plan] = {}
_launches: dict[Any, Launch] = {}


def rotate_and_append(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, positions: Tensor, k_cache: Tensor,
    v_cache: Tensor, slot_mapping: Tensor, is_neox: bool,
) -> None:  # fmt: skip
    """Repeat a launch that was made for such arguments, or find out which to make."""
    tensors = (q, k, v, k_cache, v_cache, cache, positions, slot_mapping)
    key = (
        *[(t.shape, t.stride()) for t in tensors], q.dtype, positions.dtype, is_neox,
        q.get_device(),
    )  # fmt: skip
    known = _launches.get(key)
    if known is not None and (known.lane == 1 or _aligned(tensors)):
        known.variant(known.programs, tensors, known.numbers)
    elif q.numel() or k.numel() or v.numel():
        made = _find(tensors, is_neox)
        if made is not None and (made.lane > 1 or _aligned(tensors)):
            remember(_launches, key, made)


def _aligned(tensors: tuple[Tensor, ...]) -> bool:
    q, k, v, k_cache, v_cache, cache, *_ = tensors
    places = q.data_ptr() | k.data_ptr() | v.data_ptr() | cache.data_ptr()
    return (places | k_cache.data_ptr() | v_cache.data_ptr()) % _BYTES == 0


def _find(given: tuple[Tensor, ...], is_neox: bool) -> Launch | None:
    """Copy what the kernel can't walk, launch, and give the launch if it can be repeated."""
    q, k, v, k_cache, v_cache, cache, positions, slot_mapping = given
    cache = cache if cache.stride(1) == 1 else cache.contiguous()
    walked = (
        walkable(q), walkable(k), v, k_cache, v_cache, cache, positions.contiguous(),
        slot_mapping.contiguous(),
    )  # fmt: skip
    launch = _launch(walked, is_neox)
    launch.variant(launch.programs, walked, launch.numbers)
    if walked[0] is not q:
        q.copy_(walked[0])
    same = all(mine is theirs for mine, theirs in zip(walked, given, strict=True))
    return launch if same else None


def _launch(walked: tuple[Tensor, ...], is_neox: bool) -> Launch:
    """Describe the launch for tensors that the kernel can walk."""
    q, k, v, k_cache, _, cache, positions, _ = walked
    tokens, q_heads, size = q.shape
    k_heads, rotary, page = k.shape[1], cache.shape[1], k_cache.shape[1]
    lane = _lane(walked, rotary // 2, size - rotary)
    cache_lane = 4 if lane > 1 else 1
    heads = power_of_two(max(q_heads, k_heads))
    key = (
        q.dtype, positions.dtype, rotary, size, v.shape[2], page, heads, lane, is_neox,
        q.get_device(),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.setdefault(key, _plan(walked, heads, lane, is_neox))
    blocks = -(-q_heads // plan.heads) + 2 * -(-k_heads // plan.heads)
    steps = (*q.stride()[:2], *k.stride()[:2], *(n for t in walked[2:5] for n in t.stride()))
    numbers = (
        tokens, q_heads, k_heads, k_cache.shape[0] * page, rotary // 2 // lane,
        (size - rotary) // lane, cache.stride(0) // cache_lane, cache.shape[0],
        *(step // lane for step in steps),
    )  # fmt: skip
    return Launch(plan.variant, -(-tokens // plan.tokens) * blocks, numbers, lane)


def _lane(walked: tuple[Tensor, ...], half: int, tail: int) -> int:
    """Give how many elements a thread accesses at once: 1 unless everything is aligned."""
    itemsize, cache = walked[0].element_size(), walked[5]
    lane = lane_of(half, itemsize)
    if tail % lane or cache.stride(0) % 4:
        return 1
    steps = [t.stride() for t in walked[:5]]
    return min(lane, lane_of_steps(steps, itemsize, _aligned(walked)))


def _plan(walked: tuple[Tensor, ...], heads: int, lane: int, is_neox: bool) -> _Plan:
    q, _, v, k_cache, _, cache, _, _ = walked
    rotary, width_v = cache.shape[1], v.shape[2]
    half = power_of_two(rotary // 2) if rotary else 0
    tail = 0 if q.shape[2] == rotary else power_of_two(q.shape[2] - rotary)
    block_v = power_of_two(max(width_v, lane))
    chosen = config(max(half, tail // 2, block_v // 2, 1), q.element_size(), heads)
    constants = (
        is_neox, lane, 4 if lane > 1 else 1, k_cache.shape[1], half, tail, width_v, block_v,
        chosen.tokens, chosen.heads,
    )  # fmt: skip
    variant = _rotate_and_append.variant(
        constants, chosen.threads, q.get_device(), aligned=lane > 1
    )
    return _Plan(variant, chosen.tokens, chosen.heads)
