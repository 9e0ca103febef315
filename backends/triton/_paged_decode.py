"""Paged decode in Triton: how sequences are cut, tile sizes, and the launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._attention import arch_of, in_powers_of_2, positive, shared_memory, shift_of
from ._launch import WARP, Variant, multiprocessors
from ._paged_decode_kernel import decode, unite
from ._pages import LONGEST_WINDOW, id_count, lane_of_steps, regular, steps_of
from ._rows import power_of_two

__all__ = [
    "CONFIGS",
    "SEQUENCES",
    "UNITED",
    "Config",
    "config",
    "cut",
    "forward",
]

_BYTES = 16
SEQUENCES = 512
"""Looked through at once for the owner of a piece."""
UNITED = 16
"""Pieces that are summed at once."""
_ROWS = 32  # more go to tensor cores that mustn't run beside loads one by one: see `_attention`


class Config(NamedTuple):
    """How a call is cut into programs.

    Attributes:
        block_n: Keys of a step.
        warps: Warps of a program.
        stages: Steps whose keys and values are in flight.
        programs: How many of them a multiprocessor runs at once.
        least: Steps that a piece has at least.
    """

    block_n: int
    warps: int
    stages: int
    programs: int
    least: int


# What `python -m benchmarks paged --configs` compares on a GPU.
CONFIGS = tuple(
    Config(*numbers)
    for numbers in (
        (32, 2, 3, 5, 8), (32, 2, 3, 5, 4), (32, 2, 4, 4, 8), (32, 4, 3, 5, 8), (32, 4, 4, 4, 8),
        (64, 2, 3, 3, 4), (64, 4, 3, 3, 4), (64, 4, 3, 3, 2), (64, 2, 2, 5, 4), (64, 2, 3, 6, 4),
        (128, 4, 2, 3, 2), (128, 8, 2, 3, 2), (32, 2, 3, 10, 8), (16, 2, 4, 9, 16),
    )
)  # fmt: skip


def config(arch: str | None, itemsize: int, width: int, rows: int) -> Config:
    """Choose tile sizes; strides are no reason for others, which would sum in another order.

    Args:
        arch: ``"sm_90"``, ``"gfx942"``, None for the interpreter.
        itemsize: Bytes of an element.
        width: Padded length of a head, the longer one of keys' and values'.
        rows: Query heads of a program, padded.
    """
    if arch is None:
        return Config(64, 4, 1, 4, 1)
    if itemsize == 4 or arch.startswith("gfx"):
        return Config(32 if width <= 128 else 16, 4, 1, 4, 8)
    chosen = Config(32, 4, 4 if rows <= 16 and width <= 128 else 3, 1, 8)
    row = width * itemsize
    staged = 2 * (chosen.stages - 1) * chosen.block_n * row
    used = staged + rows * row + 2048  # queries, what warps exchange, and what is reserved
    return chosen._replace(programs=max(1, min((shared_memory(arch) + 1024) // used, 8)))


class Call(NamedTuple):
    """All that a plan depends on.

    Attributes:
        shapes, strides: Those of queries and caches.
        dtype: Of all of them.
        device: Index of the GPU, -1 on a CPU.
        scale, window_left, logits_soft_cap: Arguments of the op; the scale is positive.
        aligned: Whether all addresses are multiples of 16 bytes.
        chosen: Tile sizes, None for those of `config`.
    """

    shapes: tuple[Sequence[int], ...]
    strides: tuple[Sequence[int], ...]
    dtype: torch.dtype
    device: int
    scale: float
    window_left: int
    logits_soft_cap: float
    aligned: bool
    chosen: Config | None


def forward(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    scale: float | None,
    window_left: int,
    logits_soft_cap: float,
    chosen: Config | None = None,
) -> Tensor:
    """Attend; ``chosen`` are tile sizes other than those of `config`."""
    out = q.new_empty((*q.shape[:2], v_cache.shape[3]))
    if not out.numel() or not k_cache.numel() or not kv_indices.numel():
        return out.zero_()
    q, scale = positive(q, scale)
    q = regular(q)
    call = Call(
        (q.shape, k_cache.shape, v_cache.shape),
        (q.stride(), k_cache.stride(), v_cache.stride()),
        q.dtype, q.get_device(), scale, window_left, logits_soft_cap,
        (q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()) % _BYTES == 0, chosen,
    )  # fmt: skip
    table = (kv_indptr.contiguous(), kv_indices.contiguous(), kv_last_page_len.contiguous())
    _plan(call)(q, k_cache, v_cache, table, out)
    return out


class Cut(NamedTuple):
    """Into how many pieces sequences are cut; numbers of `decode`.

    Attributes:
        share: The fewest pages that a piece is cut to; of windows, the most.
        pieces: How many pieces all sequences are cut into, about; of windows, those of each.
        slots: Room for pieces of all sequences; one a sequence where none is cut.
    """

    share: int
    pieces: int
    slots: int


def cut(batch: int, listed: int, span: int, share: int, pieces: int, align: int) -> Cut:
    """Cut sequences by what is known without reading the page table.

    Args:
        batch: Sequences.
        listed: Length of kv_indices: all sequences together have no more pages.
        span: Pages that a window touches at most, 0 without one.
        share: The fewest pages of a piece.
        pieces: How many pieces are wanted.
        align: Pieces are multiples of this many pages.
    """
    if not span:
        return Cut(share, pieces, batch + (min(pieces, listed // share) if listed > share else 0))
    span = min(span, listed)
    wanted = -(-pieces // batch)
    most = max(share, -(-span // (wanted * align)) * align)
    return Cut(most, -(-span // most), batch * -(-span // most))


class _Plan:
    """How calls of one shape are launched, whatever the length of the page table."""

    def __init__(self, call: Call) -> None:
        (self._batch, self._heads, head_dim), (pages, page, kv_heads, _), shape = call.shapes
        steps = steps_of(call.shapes, call.strides)
        lane = lane_of_steps(steps, call.dtype.itemsize, call.aligned)
        group, self._value_dim = self._heads // kv_heads, shape[3]
        block_m = max(16, min(power_of_two(group), _ROWS))
        width = max(16, power_of_two(max(head_dim, shape[3])))
        chosen = call.chosen or config(arch_of(call.device), call.dtype.itemsize, width, block_m)
        self._groups = kv_heads * -(-group // block_m)
        self._align = align = max(1, chosen.block_n // page)
        self._share = -(-chosen.least * chosen.block_n // (page * align)) * align
        pieces = max(1, chosen.programs * multiprocessors(call.device) // self._groups)
        # Equally long sequences are cut into as many pieces each as run at once, and no more.
        self._pieces = pieces // self._batch * self._batch or pieces
        self._span = call.window_left // page + 2 if call.window_left >= 0 else 0
        capped = call.logits_soft_cap > 0
        self._window = min(call.window_left, LONGEST_WINDOW)
        self._scaling = (*in_powers_of_2(call.scale, call.logits_soft_cap), self._window)
        self._pages = pages
        self._steps = [step // lane for each in steps for step in each]
        self._variants = {
            split: _variants(
                call.dtype, chosen, (self._span > 0, capped, split),
                (group, head_dim, shape[3], lane, page, align, id_count(chosen.block_n, page)),
                block_m, call.device,
            )
            for split in (False, True)
        }  # fmt: skip

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, table: tuple[Tensor, Tensor, Tensor], out: Tensor
    ) -> None:
        indptr, indices, last = table
        listed = indices.shape[0]
        share, pieces, slots = cut(
            self._batch, listed, self._span, self._share, self._pieces, self._align
        )
        split = slots > self._batch
        run, unite_pieces = self._variants[split]
        parts = None
        if split:
            size = slots * self._heads * (self._value_dim + 2)
            parts = q.new_empty(size, dtype=torch.float32)
        sizes = (self._batch, self._heads, listed)
        run(
            slots * self._groups, (q, k, v, indptr, indices, last, out, parts),
            (*self._scaling, *sizes, self._pages, share, pieces, *self._steps),
        )  # fmt: skip
        if split:
            unite_pieces(
                self._batch * self._heads, (indptr, last, out, parts),
                (self._window, *sizes, share, pieces, slots),
            )  # fmt: skip


_plan = functools.lru_cache(maxsize=4096)(_Plan)


@functools.cache
def _variants(
    dtype: torch.dtype, chosen: Config, flags: tuple[bool, bool, bool], sizes: tuple[int, ...],
    block_m: int, device: int,
) -> tuple[Variant, Variant]:  # fmt: skip
    """Give both kernels for a dtype, (windowed, capped, split) and sizes from GROUP to IDS."""
    head_dim, value_dim, lane, page, align, ids = sizes[1:]
    block_d, block_v = (max(16, power_of_two(width)) for width in (head_dim, value_dim))
    stages = chosen.stages if ids else 2 * chosen.stages - 1
    constants = (
        *flags, shift_of(dtype), *sizes, SEQUENCES,
        block_m, chosen.block_n, block_d, block_v, stages,
    )  # fmt: skip
    options = {"enable_fp_fusion": True, "num_stages": stages}
    aligned = lane > 1
    first = decode.variant(constants, chosen.warps * WARP, device, aligned=aligned, options=options)
    last = unite.variant(
        (flags[0], value_dim, page, align, block_v, UNITED), 4 * WARP, device, aligned=True
    )
    return first, last
