"""Runs experts: tokens sorted by expert, two grouped products, and a sum over each token's experts.

No atomics: the result of every assignment of a token to an expert is kept in float32, and those of
a token are added in their order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from torch_ops import limits

from ._align import align
from ._attention import arch_of, shared_memory
from ._launch import INTERPRETED, Variant, device_function, kernel
from ._rows import power_of_two

__all__ = ["refusal", "run"]

_SUM_BLOCK = 1024
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@device_function
def _tile(
    blocks: tl.tensor, columns: tl.tensor, total: tl.tensor,
    BLOCK_M: tl.constexpr, GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Give block of rows, block of columns, and whether rows are there.

    GROUP blocks of rows go through all columns together, so that weights stay in the cache.
    """
    program = tl.program_id(0)
    group = program // (GROUP * columns)
    size = tl.minimum(blocks - group * GROUP, GROUP)
    inside = program % (GROUP * columns)
    row = group * GROUP + inside % size
    return row, inside // size, row * BLOCK_M < tl.load(total)


@kernel(unaligned=("order", "experts", "total"))
def _gate_up(
    x: tl.tensor, w: tl.tensor, hidden: tl.tensor, order: tl.tensor, experts: tl.tensor,
    total: tl.tensor,
    blocks: tl.int32, columns: tl.int32, assignments: tl.int32, k: tl.int32, depth: tl.int32,
    width: tl.int32, x_row: tl.int64, x_column: tl.int64,
    w_expert: tl.int64, w_row: tl.int64, w_column: tl.int64,
    PACKED: tl.constexpr, LANE: tl.constexpr, DEPTH_LANE: tl.constexpr, WIDTH_LANE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply BLOCK_M assignments by gate and up of their expert; strides are in lanes."""
    # Says that sizes are multiples, so that masks keep loads and stores whole.
    depth = depth // DEPTH_LANE * DEPTH_LANE
    width = width // WIDTH_LANE * WIDTH_LANE
    block, part, exists = _tile(blocks, columns, total, BLOCK_M, GROUP)
    expert = tl.load(experts + block).to(tl.int64)
    if (expert < 0) | (exists == 0):
        return
    assignment = tl.load(order + block * BLOCK_M + tl.arange(0, BLOCK_M))
    given = assignment < assignments
    token = tl.where(given, assignment // k, 0).to(tl.int64)
    feature = part * BLOCK_N + tl.arange(0, BLOCK_N)
    held = feature < width
    row = tl.where(held, feature, 0).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    weights = w + expert * (w_expert * LANE)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        at = (start + inner).to(tl.int64)
        there = at < depth
        x_at = at if PACKED else at * x_column
        w_at = at if PACKED else at * w_column
        a = tl.load(
            x + token[:, None] * (x_row * LANE) + x_at[None, :],
            mask=given[:, None] & there[None, :], other=0.0,
        )  # fmt: skip
        both = held[None, :] & there[:, None]
        g_at = row[None, :] * (w_row * LANE) + w_at[:, None]
        g = tl.load(weights + g_at, mask=both, other=0.0)
        u = tl.load(weights + g_at + width.to(tl.int64) * (w_row * LANE), mask=both, other=0.0)
        gate = tl.dot(a, g, gate, input_precision="ieee")
        up = tl.dot(a, u, up, input_precision="ieee")
    value = gate / (1.0 + tl.exp(-gate)) * up
    target = hidden + assignment[:, None].to(tl.int64) * width + feature[None, :]
    tl.store(target, value.to(hidden.dtype.element_ty), mask=given[:, None] & held[None, :])


@kernel(unaligned=("order", "experts", "total", "shares"))
def _down(
    hidden: tl.tensor, w: tl.tensor, parts: tl.tensor, shares: tl.tensor, order: tl.tensor,
    experts: tl.tensor, total: tl.tensor,
    blocks: tl.int32, columns: tl.int32, assignments: tl.int32, depth: tl.int32, width: tl.int32,
    w_expert: tl.int64, w_row: tl.int64, w_column: tl.int64,
    PACKED: tl.constexpr, LANE: tl.constexpr, DEPTH_LANE: tl.constexpr, WIDTH_LANE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply BLOCK_M assignments by what leads down, and by the token's weight."""
    # Says that sizes are multiples, so that masks keep loads and stores whole.
    depth = depth // DEPTH_LANE * DEPTH_LANE
    width = width // WIDTH_LANE * WIDTH_LANE
    block, part, exists = _tile(blocks, columns, total, BLOCK_M, GROUP)
    expert = tl.load(experts + block).to(tl.int64)
    if (expert < 0) | (exists == 0):
        return
    assignment = tl.load(order + block * BLOCK_M + tl.arange(0, BLOCK_M))
    given = assignment < assignments
    source = tl.where(given, assignment, 0).to(tl.int64)
    feature = part * BLOCK_N + tl.arange(0, BLOCK_N)
    held = feature < width
    row = tl.where(held, feature, 0).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    weights = w + expert * (w_expert * LANE)
    result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        at = (start + inner).to(tl.int64)
        there = at < depth
        w_at = at if PACKED else at * w_column
        a = tl.load(
            hidden + source[:, None] * depth + at[None, :],
            mask=given[:, None] & there[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            weights + row[None, :] * (w_row * LANE) + w_at[:, None],
            mask=held[None, :] & there[:, None], other=0.0,
        )  # fmt: skip
        result = tl.dot(a, b, result, input_precision="ieee")
    share = tl.load(shares + source, mask=given, other=0.0)
    target = parts + source[:, None] * width + feature[None, :]
    tl.store(target, result * share[:, None], mask=given[:, None] & held[None, :])


@kernel(unaligned=("ids",))
def _sum(
    parts: tl.tensor, ids: tl.tensor, out: tl.tensor,
    columns: tl.int32, k: tl.int32, width: tl.int32, experts: tl.int32,
    LANE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Add the parts of a token in the order of its experts; those of no expert aren't read."""
    width = width // LANE * LANE
    program = tl.program_id(0)
    token = (program // columns).to(tl.int64)
    column = program % columns * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for index in range(k):
        expert = tl.load(ids + token * k + index)
        end = tl.where((expert >= 0) & (expert < experts), width, 0)
        at = (token * k + index) * width + column
        total += tl.load(parts + at, mask=column < end, other=0.0)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


class Config(NamedTuple):
    """Tiles of a product.

    Attributes:
        block_m, block_n, block_k: Assignments, features and depth of a tile.
        group: Blocks of rows that share the columns in the cache.
        threads: Threads of a program.
        stages: Steps of which loads are in flight.
    """

    block_m: int
    block_n: int
    block_k: int
    group: int
    threads: int
    stages: int


def config(arch: str | None, itemsize: int, per_expert: int, matrices: int) -> Config:
    """Choose tiles that fit into shared memory.

    Args:
        arch: As of `arch_of`.
        itemsize: Bytes of an element.
        per_expert: Assignments of an expert, on average.
        matrices: How many matrices of weights are multiplied at once.
    """
    block_m = min(max(power_of_two(per_expert), 16), 128)
    if arch is None:
        return Config(min(block_m, 32), 32, 32, 4, 32, 1)
    if itemsize == 4:  # products of float32 without tensor cores
        return Config(min(block_m, 32), 32, 32, 8, 128, 2)
    block_n = 64 if block_m == 128 and arch not in ("sm_90", "sm_100", "sm_103") else 128
    threads = 256 if block_m == 128 else 128
    step = (block_m + matrices * block_n) * 64 * itemsize
    most = 2 if arch.startswith("gfx") else 4
    stages = max(min(shared_memory(arch) // step, most), 1)
    return Config(block_m, block_n, 64, 8, threads, stages)


def refusal(x: Tensor) -> str | None:
    """Give why experts can't be run in this dtype, or None."""
    if x.dtype not in _DTYPES:
        return limits.unsupported("x", x, _DTYPES)
    if INTERPRETED and x.dtype == torch.bfloat16:
        return (
            "torch.bfloat16 is untestable in Triton's interpreter, which truncates where a GPU "
            "rounds (supported there: torch.float16, torch.float32)"
        )
    return None


def run(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Give the sum of each token's experts by weight."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    experts, hidden_size, width = w_down.shape
    tokens, k = ids.shape
    if not out.numel():
        return out
    if not (k and experts and width):
        return out.zero_()
    shares, ids = weights.contiguous(), ids.contiguous()
    device, count = x.get_device(), tokens * k
    arch, each = arch_of(device), -(-count // experts)
    first, second = (config(arch, x.element_size(), each, matrices) for matrices in (2, 1))
    order, owners, total = align(ids, experts, first.block_m)
    blocks = owners.shape[0]
    hidden = torch.empty((count, width), dtype=x.dtype, device=x.device)
    parts = torch.empty((count, hidden_size), dtype=torch.float32, device=x.device)
    columns = -(-width // first.block_n)
    lane, steps = _lanes(x, w_gate_up)
    own = _lane(hidden_size, x), _lane(width, x)
    _variant("gate_up", first, (lane > 0, max(lane, 1), *own), device, x.dtype)(
        blocks * columns, (x, w_gate_up, hidden, order, owners, total),
        (blocks, columns, count, k, hidden_size, width, *steps),
    )  # fmt: skip
    columns = -(-hidden_size // second.block_n)
    lane, steps = _lanes(w_down)
    _variant("down", second, (lane > 0, max(lane, 1), *own[::-1]), device, x.dtype)(
        blocks * columns, (hidden, w_down, parts, shares, order, owners, total),
        (blocks, columns, count, width, hidden_size, *steps),
    )  # fmt: skip
    columns = -(-hidden_size // _SUM_BLOCK)
    _sum_variant(own[0], device, x.dtype)(
        tokens * columns, (parts, ids, out), (columns, k, hidden_size, experts)
    )
    return out


def _lane(size: int, x: Tensor) -> int:
    """Give how many elements of 16 bytes divide a row of results, 1 where none do."""
    lane = 16 // x.element_size()
    return lane if size % lane == 0 else 1


def _lanes(*tensors: Tensor) -> tuple[int, tuple[int, ...]]:
    """Give elements that a load may take at once, 0 where columns lie apart, and strides in them.

    Loads of 16 bytes need addresses and all strides but the last to be multiples of that.
    """
    strides = [tensor.stride() for tensor in tensors]
    if any(step[-1] != 1 for step in strides):
        return 0, tuple(step for steps in strides for step in steps)
    lane = 16 // tensors[0].element_size()
    far = (step for steps in strides for step in steps[:-1])
    if any(step % lane for step in far) or any(t.data_ptr() % 16 for t in tensors):
        lane = 1
    return lane, tuple(step // lane for steps in strides for step in (*steps[:-1], lane))


_KERNELS: Mapping[str, Any] = {"gate_up": _gate_up, "down": _down}


@functools.lru_cache(maxsize=256)
def _variant(
    name: str, tiles: Config, flags: tuple[int, ...], device: int, dtype: torch.dtype
) -> Variant:
    """Make a product's variant; the dtype is part of the key."""
    constants = (*flags, tiles.block_m, tiles.block_n, tiles.block_k, tiles.group)
    made: Variant = _KERNELS[name].variant(
        constants, tiles.threads, device, aligned=flags[1] > 1,
        options={"num_stages": tiles.stages},
    )  # fmt: skip
    return made


@functools.lru_cache(maxsize=64)
def _sum_variant(lane: int, device: int, dtype: torch.dtype) -> Variant:
    return _sum.variant((lane, _SUM_BLOCK), 128, device, aligned=True)
