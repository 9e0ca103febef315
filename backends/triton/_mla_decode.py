"""Attention to latents in Triton: tile sizes and the launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._attention import arch_of, in_powers_of_2, positive, refusal, shared_memory, shift_of
from ._launch import WARP, Variant, multiprocessors
from ._mla_decode_kernel import decode_latents
from ._paged_decode import SEQUENCES, UNITED, cut
from ._paged_decode_kernel import unite
from ._pages import id_count, lane_of_steps, regular, regular_pages, steps_of
from ._rows import power_of_two

__all__ = ["CONFIGS", "Config", "config", "forward", "unfit"]

_BYTES = 16
_LONGEST, _LONGEST_ROTATED = 512, 256


class Config(NamedTuple):
    """How a call is cut into programs.

    Attributes:
        block_m: Heads of a program.
        block_n: Keys of a step.
        warps: Warps of a program.
        stages: Steps whose keys are in flight, and the one that is attended.
        programs: How many of them a multiprocessor runs at once.
        least: Steps that a piece has at least.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    programs: int
    least: int


# What `python -m benchmarks latents --configs` compares on a GPU of sm_90.
CONFIGS = tuple(
    Config(*numbers)
    for numbers in (
        (64, 32, 8, 3, 1, 4), (64, 64, 8, 2, 1, 2), (64, 32, 8, 2, 1, 4), (32, 32, 8, 3, 1, 4),
        (16, 32, 4, 3, 2, 4), (16, 32, 4, 4, 1, 4), (16, 64, 4, 3, 1, 2), (16, 32, 8, 3, 2, 4),
        (16, 16, 4, 4, 3, 8),
    )
)  # fmt: skip


def config(arch: str | None, itemsize: int, heads: int, widths: int, lane: int) -> Config:
    """Choose tile sizes.

    From Hopper on 64 heads fill a matrix instruction; their sums are half of the registers, their
    queries and three tiles nearly all of shared memory. Up to 16 heads wait for loads alone: two
    programs of them are in flight. As in `_attention`, what is loaded element by element goes to
    tensor cores that don't work on their own.

    Args:
        arch: ``"sm_90"``, ``"gfx942"``, None for the interpreter.
        itemsize: Bytes of an element.
        heads: Query heads.
        widths: Padded elements of a key, both parts.
        lane: Elements that are loaded at once.
    """
    if arch is None:  # the interpreter's time goes by programs and steps, not by elements
        return Config(max(16, power_of_two(heads)), 64, 4, 1, 4, 1)
    if itemsize == 4:
        return Config(16, 16, 4, 1, 2, 8)
    if arch.startswith("gfx"):
        return Config(16 if heads <= 16 else 32, 32, 4, 1, 2, 4)
    memory = shared_memory(arch)
    if heads > 16 and lane > 1 and arch in ("sm_90", "sm_100", "sm_103"):
        return Config(64, 32, 8, 3, 1, 4)
    key = widths * itemsize
    rows, stages = (32, 3) if heads > 16 and (32 + 2 * 32) * key < memory - 8192 else (16, 3)
    used = (rows + 32 * (stages - 1)) * key + 2048  # what warps exchange, and what is reserved
    programs = max(1, min((memory + 1024) // used, 4 if rows == 16 else 1))
    return Config(rows, 32, 4 if rows == 16 else 8, stages, programs, 4)


def unfit(dtype: torch.dtype, latent: int, rotated: int, scale: float) -> str | None:
    """Give why keys like these can't be served, or None."""
    reason = refusal(dtype, 1, 1, scale)
    if reason is not None:
        return reason
    if latent > _LONGEST:
        return f"latents of {latent} elements (supported: up to {_LONGEST})"
    if rotated > _LONGEST_ROTATED:
        return f"rotated parts of {rotated} elements (supported: up to {_LONGEST_ROTATED})"
    return None


class _Call(NamedTuple):
    """All that a plan depends on; the scale is positive."""

    shapes: tuple[Sequence[int], ...]
    strides: tuple[Sequence[int], ...]
    dtype: torch.dtype
    device: int
    scale: float
    aligned: bool
    chosen: Config | None


def forward(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    scale: float,
    chosen: Config | None = None,
) -> Tensor:
    """Attend; ``chosen`` are tile sizes other than those of `config`."""
    out = q_nope.new_empty(q_nope.shape)
    if not out.numel() or not ckv_cache.numel() or not kv_indices.numel():
        return out.zero_()
    q_nope, factor = positive(q_nope, scale)
    q_pe, _ = positive(q_pe, scale)
    q_nope, q_pe = regular(q_nope), regular(q_pe)
    ckv_cache, kpe_cache, kv_indices = regular_pages(ckv_cache, kpe_cache, kv_indices)
    tensors = (q_nope, q_pe, ckv_cache, kpe_cache)
    address = q_nope.data_ptr() | q_pe.data_ptr() | ckv_cache.data_ptr() | kpe_cache.data_ptr()
    call = _Call(
        (q_nope.shape, q_pe.shape, ckv_cache.shape[1:], kpe_cache.shape[1:]),
        (q_nope.stride(), q_pe.stride(), ckv_cache.stride(), kpe_cache.stride()),
        q_nope.dtype, q_nope.get_device(), factor, address % _BYTES == 0, chosen,
    )  # fmt: skip
    table = (kv_indptr.contiguous(), kv_indices.contiguous(), kv_last_page_len.contiguous())
    _plan(call)(tensors, table, out)
    return out


class _Plan:
    """How calls of one shape are launched, whatever the numbers of pages and of listed ones."""

    def __init__(self, call: _Call) -> None:
        (self._batch, self._heads, latent), (*_, rotated), (page, _), _ = call.shapes
        shapes = [*call.shapes[:2], *((2, *shape) for shape in call.shapes[2:])]
        steps = steps_of(shapes, call.strides)
        lane = lane_of_steps(steps, call.dtype.itemsize, call.aligned)
        widths = sum(max(16, power_of_two(width)) for width in (latent, rotated))
        chosen = call.chosen or config(
            arch_of(call.device), call.dtype.itemsize, self._heads, widths, lane
        )
        self._latent = latent
        self._groups = -(-self._heads // chosen.block_m)
        self._align = align = max(1, chosen.block_n // page)
        self._share = -(-chosen.least * chosen.block_n // (page * align)) * align
        pieces = max(1, chosen.programs * multiprocessors(call.device) // self._groups)
        # Equally long sequences are cut into as many pieces each as run at once, and no more.
        self._pieces = pieces // self._batch * self._batch or pieces
        self._scale = in_powers_of_2(call.scale, 0.0)[0]
        self._steps = [step // lane for each in steps for step in each]
        sizes = (latent, rotated, lane, page, align, id_count(chosen.block_n, page))
        self._variants = {
            split: _variants(call.dtype, chosen, split, sizes, call.device)
            for split in (False, True)
        }

    def __call__(
        self, tensors: Sequence[Tensor], table: tuple[Tensor, Tensor, Tensor], out: Tensor
    ) -> None:
        indptr, indices, last = table
        listed, pages = indices.shape[0], tensors[2].shape[0]
        share, pieces, slots = cut(self._batch, listed, 0, self._share, self._pieces, self._align)
        split = slots > self._batch
        run, unite_pieces = self._variants[split]
        parts = None
        if split:
            size = slots * self._heads * (self._latent + 2)
            parts = out.new_empty(size, dtype=torch.float32)
        sizes = (self._batch, self._heads, listed)
        run(
            slots * self._groups, (*tensors, indptr, indices, last, out, parts),
            (self._scale, *sizes, pages, share, pieces, *self._steps),
        )  # fmt: skip
        if split:
            unite_pieces(
                self._batch * self._heads, (indptr, last, out, parts),
                (-1, *sizes, share, pieces, slots),
            )  # fmt: skip


_plan = functools.lru_cache(maxsize=4096)(_Plan)


@functools.cache
def _variants(
    dtype: torch.dtype, chosen: Config, split: bool, sizes: tuple[int, ...], device: int
) -> tuple[Variant, Variant]:
    """Give both kernels for a dtype and sizes from WIDTH to IDS."""
    latent, rotated, lane, page, align, ids = sizes
    block_l, block_r = (max(16, power_of_two(width)) for width in (latent, rotated))
    stages = chosen.stages if ids else 2 * chosen.stages - 1
    constants = (
        split, shift_of(dtype), *sizes, SEQUENCES, chosen.block_m, chosen.block_n, block_l, block_r,
        stages,
    )  # fmt: skip
    options = {"enable_fp_fusion": True, "num_stages": stages}
    first = decode_latents.variant(
        constants, chosen.warps * WARP, device, aligned=lane > 1, options=options
    )
    last = unite.variant(
        (False, latent, page, align, block_l, UNITED), 4 * WARP, device, aligned=True
    )
    return first, last
