"""Products of large float8 matrices on Hopper, in Gluon: who loads and who multiplies is explicit.

One warp loads steps ahead with the tensor memory accelerator, also those of the next tile. Two
groups of four warps take 128 rows of a tile each. Tensor cores keep 13 bits of float8's sums, so a
group adds those of a step to its own; the other group has the tensor cores meanwhile.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ._hopper import barriers, device_function, load, store

__all__ = ["multiply_large"]

_HALF = gl.constexpr(64)  # rows of an instruction, 4 for a tile
_COLUMNS = gl.constexpr(128)
_STEP = gl.constexpr(128)  # products, of a byte each, which are a row of a swizzled tile
_LANE = gl.constexpr(8)  # elements of a row of the result come in eights
_GROUPED_ROWS = gl.constexpr(8)  # tiles of so many rows run together, so that `b` stays in L2


@device_function
def _place(tile: gl.tensor, m: gl.tensor, n: gl.tensor) -> tuple[gl.tensor, gl.tensor]:
    """Give the first row and column of a tile."""
    tiles_m, tiles_n = gl.cdiv(m, 4 * _HALF), gl.cdiv(n, _COLUMNS)
    band = _GROUPED_ROWS * tiles_n
    first = tile // band * _GROUPED_ROWS
    rows = gl.minimum(tiles_m - first, _GROUPED_ROWS)
    inside = tile % band
    return (first + inside % rows) * (4 * _HALF), inside // rows * _COLUMNS


@device_function
def _scale(
    at: gl.tensor, index: gl.tensor, size: gl.tensor, ONE: gl.constexpr
) -> gl.tensor:  # fmt: skip
    """Load the scales of some rows or columns, or the one that all share."""
    if ONE:
        return gl.full(index.shape, 1.0, gl.float32, index.type.layout) * gl.load(at)
    return gl.load(at + index, mask=index < size, other=0.0)


@device_function
def _store(
    upper: gl.tensor, lower: gl.tensor, place: gl.tuple, y: gl.tensor, staged: gl.tensor,
    scales: gl.tuple, sizes: gl.tuple,
    A_ONE: gl.constexpr, B_ONE: gl.constexpr, LAYOUT: gl.constexpr,
) -> None:  # fmt: skip
    """Scale sums of 128 rows, add the bias, and write what is inside, 64 rows at a time."""
    scale_a, scale_b, bias = scales
    columns = place[1] + gl.arange(0, _COLUMNS, gl.SliceLayout(0, LAYOUT))
    right = _scale(scale_b, columns, sizes[1], B_ONE)
    if bias is not None:
        more = gl.load(bias + columns, mask=columns < sizes[1], other=0.0).to(gl.float32)
    for half in gl.static_range(2):
        row = place[0] + half * _HALF
        rows = row + gl.arange(0, _HALF, gl.SliceLayout(1, LAYOUT))
        left = _scale(scale_a, rows, sizes[0], A_ONE)
        sums = (lower if half else upper) * (left[:, None] * right[None, :])
        if bias is not None:
            sums += more[None, :]
        tma.store_wait(0)  # what was staged before is read
        staged.store(sums.to(y.dtype))
        fence_async_shared()
        store(y, [row, place[1]], staged)


@device_function
def _multiply(
    y: gl.tensor, memory: gl.tuple, full: gl.tensor, free: gl.tensor, scales: gl.tuple,
    sizes: gl.tuple, tiles: gl.tensor, steps: gl.tensor,
    GROUP: gl.constexpr, A_ONE: gl.constexpr, B_ONE: gl.constexpr, STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Multiply the first or the second 128 rows of tiles."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 32])
    a_at, b_at, y_at = memory
    zeros = gl.zeros([_HALF, _COLUMNS], gl.float32, LAYOUT)
    done = tiles * 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = _place(tile, sizes[0], sizes[1])
        upper = gl.zeros([_HALF, _COLUMNS], gl.float32, LAYOUT)
        lower = gl.zeros([_HALF, _COLUMNS], gl.float32, LAYOUT)
        for _ in range(steps):
            stage = done % STAGES
            mbarrier.wait(full.index(stage), (done // STAGES) & 1)
            b = b_at.index(stage).permute((1, 0))
            first = stage * 4 + GROUP * 2
            part = warpgroup_mma(
                a_at.index(first), b, zeros, use_acc=False, max_num_imprecise_acc=_STEP,
                is_async=True,
            )  # fmt: skip
            upper += warpgroup_mma_wait(0, [part])
            part = warpgroup_mma(
                a_at.index(first + 1), b, zeros, use_acc=False, max_num_imprecise_acc=_STEP,
                is_async=True,
            )  # fmt: skip
            lower += warpgroup_mma_wait(0, [part])
            mbarrier.arrive(free.index(stage))
            done += 1
        place = (row + GROUP * 2 * _HALF, column)
        _store(
            upper, lower, place, y, y_at.index(GROUP), scales, sizes, A_ONE, B_ONE, LAYOUT,
        )  # fmt: skip
    tma.store_wait(0)


@device_function
def _load_ahead(
    a: gl.tensor, b: gl.tensor, memory: gl.tuple, full: gl.tensor, free: gl.tensor,
    sizes: gl.tuple, tiles: gl.tensor, steps: gl.tensor, STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Load steps of tiles, as far ahead as there are stages; what is outside is zero."""
    a_at, b_at, _ = memory
    done = tiles * 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = _place(tile, sizes[0], sizes[1])
        for step in range(steps):
            stage = done % STAGES
            mbarrier.wait(free.index(stage), ((done // STAGES) & 1) ^ 1)
            at = full.index(stage)
            mbarrier.expect(at, 4 * a.block_type.nbytes + b.block_type.nbytes)
            for part in gl.static_range(4):
                source = [row + part * _HALF, step * _STEP]
                load(a, source, at, a_at.index(stage * 4 + part))
            load(b, [column, step * _STEP], at, b_at.index(stage))
            done += 1


def _multiply_large(
    a: gl.tensor, b: gl.tensor, y: gl.tensor, scale_a: gl.tensor, scale_b: gl.tensor,
    bias: gl.tensor, m: gl.int32, n_lanes: gl.int32, k: gl.int32,
    A_ONE: gl.constexpr, B_ONE: gl.constexpr, STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Write tiles of 256 x 128 of ``(a * scale_a) @ (b.T * scale_b) + bias``.

    Args:
        a, b, y: Descriptors of ``[M, K]``, ``[N, K]`` and ``[M, N]``, in blocks of 64, of 128 and
            of 64 rows.
        scale_a, scale_b: One for all, or one for each row, side by side.
        bias: Of the columns, side by side, or None.
        m, n_lanes, k: Sizes, N in units of 8.
        A_ONE, B_ONE: Whether a scale is one for all.
        STAGES: Steps whose parts of the matrices are in flight.
    """
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    memory = (
        gl.allocate_shared_memory(a.dtype, [STAGES * 4, _HALF, _STEP], SWIZZLED),
        gl.allocate_shared_memory(b.dtype, [STAGES, _COLUMNS, _STEP], SWIZZLED),
        gl.allocate_shared_memory(y.dtype, [2, _HALF, _COLUMNS], y.layout),
    )
    full, free = barriers(STAGES, 1), barriers(STAGES, 2)
    fence_async_shared()
    sizes = (m, n_lanes * _LANE)
    tiles = gl.cdiv(m, 4 * _HALF) * gl.cdiv(n_lanes * _LANE, _COLUMNS)
    steps = gl.cdiv(k, _STEP)
    scales = (scale_a, scale_b, bias)
    gl.warp_specialize(
        [
            (_multiply, (
                y, memory, full, free, scales, sizes, tiles, steps, 0, A_ONE, B_ONE, STAGES,
            )),
            (_multiply, (
                y, memory, full, free, scales, sizes, tiles, steps, 1, A_ONE, B_ONE, STAGES,
            )),
            (_load_ahead, (a, b, memory, full, free, sizes, tiles, steps, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


multiply_large: Any = gluon.jit(
    do_not_specialize=["m", "n_lanes", "k"], do_not_specialize_on_alignment=["scale_a"]
)(_multiply_large)
