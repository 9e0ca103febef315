"""Batches of equally long sequences by FlashInfer's batched prefill; its plans, one per shape.

A plan is data on the GPU that kernels read. A CUDA graph that was captured with it needs it for
ever; another one is dropped, when there are many, after the kernels that may still read it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops import locks
from torch_ops.errors import CaptureError
from torch_ops.once import capturing, once

from . import _modules

__all__ = ["Shape", "load", "run", "steps", "tile", "usual"]

PLANS = 32
_lock = locks.lock()
_plans: dict[Shape, _Plan] = {}


def tile(head_dim: int, is_causal: bool) -> int:
    """Give how many packed keys FA3 takes at once, or a multiple.

    It multiplies the values behind the last key of a sequence by zero, and NaN stays NaN: those of
    the next sequence, where they are packed. Source: getCTATileSize in prefill_sm90.cuh of
    FlashInfer 0.6.13. Pages are masked where they are loaded.
    """
    return 192 if head_dim == 128 and not is_causal else 128


def steps(x: Tensor) -> list[int]:
    """Give the strides that lead anywhere."""
    return [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1]


def usual(x: Tensor) -> Tensor:
    """Give axes of one element the strides of a contiguous tensor: FlashInfer uses them all.

    FA3 describes tensors to the GPU by them, which takes none that is odd, and caches of pages have
    to agree in them.
    """
    found = list(x.stride())
    for axis in reversed(range(x.dim() - 1)):
        if x.shape[axis] == 1:
            found[axis] = found[axis + 1] * x.shape[axis + 1]
    return x.as_strided(x.shape, found)


class Shape(NamedTuple):
    """What a plan is made for.

    Attributes:
        pages: Whether each sequence's keys are a page of their own, or all are packed.
    """

    device: torch.device
    family: str
    dtype: torch.dtype
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    is_causal: bool
    window_left: int
    scale: float
    pages: bool


@functools.cache
def load(family: str, dtype: torch.dtype, head_dim: int, windowed: bool) -> tuple[Any, Any]:
    """Give the wrappers of packed keys and of pages, once the kernels they will run are loaded."""

    def build() -> Any:
        prefill = _modules.package("prefill")
        kind = (dtype, dtype, dtype, torch.int32, head_dim, head_dim)
        prefill.get_batch_prefill_module(family, *kind, 0, windowed, False, False)
        packed = prefill.BatchPrefillWithRaggedKVCacheWrapper
        return packed, prefill.BatchPrefillWithPagedKVCacheWrapper

    key = ("flashinfer", "ragged prefill", family, dtype, head_dim, windowed)
    what = f"FlashInfer's batched prefill {family} for {dtype}, head_dim {head_dim}"
    wrappers: tuple[Any, Any] = once(key, f"{what}, windowed" if windowed else what, build)
    return wrappers


class _Plan:
    """A planned wrapper; `streams` have run it outside of captures."""

    def __init__(self, shape: Shape) -> None:
        wrappers = load(shape.family, shape.dtype, shape.head_dim, shape.window_left >= 0)
        unused = torch.zeros(16, dtype=torch.uint8, device=shape.device)  # for split keys: off
        self.wrapper = wrappers[shape.pages](unused, "NHD", backend=shape.family)
        # Seven ints for each tile of 64 queries and head, and offsets; by default it is 8 MiB.
        room = 64 * shape.batch * shape.heads * (shape.queries // 64 + 1) + 8192
        room += shape.batch * shape.queries * shape.heads
        scratch = torch.empty(room, dtype=torch.uint8, device=shape.device)
        self.wrapper.reset_workspace_buffer(unused, scratch)
        sizes: tuple[int, ...] = (shape.heads, shape.kv_heads, shape.head_dim)
        keys: tuple[Tensor, ...] = (_offsets(shape.batch, shape.keys),)
        if shape.pages:
            indices = torch.arange(shape.batch, dtype=torch.int32, device=shape.device)
            keys = (_offsets(shape.batch, 1), indices, torch.full((shape.batch,), shape.keys).int())
            sizes = (*sizes, shape.keys)
        self.wrapper.plan(
            _offsets(shape.batch, shape.queries),
            *keys,
            *sizes,
            causal=shape.is_causal,
            window_left=shape.window_left,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            disable_split_kv=True,
        )
        # Other streams may run it next: what plan() copies has to be there.
        torch.cuda.current_stream(shape.device).synchronize()
        self.captured = False
        self.streams: set[torch.cuda.Stream] = set()

    def retire(self) -> None:
        """Keep the memory from being reused before the kernels that read it are done."""
        for held in vars(self.wrapper).values():
            if isinstance(held, Tensor) and held.is_cuda:
                for stream in self.streams:
                    held.record_stream(stream)


def _offsets(batch: int, length: int) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32) * length


def run(shape: Shape, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> Any:
    """Attend; what is packed is flattened to ``[B * S, heads, D]``, copied where that takes it."""
    plan = _planned(shape)
    if shape.pages:
        flat = q.reshape(-1, *q.shape[2:])
        return plan.wrapper.run(flat, (usual(k), usual(v)), return_lse=with_lse)
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    return plan.wrapper.run(*packed, return_lse=with_lse)


def _planned(shape: Shape) -> _Plan:
    captures = capturing()
    with _lock:
        plan = _plans.get(shape)
        if plan is None:
            if captures:
                raise CaptureError(
                    f"FlashInfer's batched prefill isn't planned for {shape}, and a stream is "
                    "capturing; prepare first: run this shape once before the capture"
                )
            _make_room()
            plan = _plans[shape] = _Plan(shape)
        if captures:
            plan.captured = True
        else:
            plan.streams.add(torch.cuda.current_stream(shape.device))
    return plan


def _make_room() -> None:
    if len(_plans) >= PLANS:
        oldest = next((shape for shape, plan in _plans.items() if not plan.captured), None)
        if oldest is not None:
            _plans.pop(oldest).retire()
