"""Batches of equally long sequences by FlashInfer's ragged prefill; its plans, one per shape.

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

__all__ = ["Shape", "load", "run"]

PLANS = 32
_lock = locks.lock()
_plans: dict[Shape, _Plan] = {}


class Shape(NamedTuple):
    """What a plan is made for."""

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


@functools.cache
def load(family: str, dtype: torch.dtype, head_dim: int, windowed: bool) -> Any:
    """Give the wrapper's class, once the kernel that it will run is loaded."""

    def build() -> Any:
        prefill = _modules.package("prefill")
        kind = (dtype, dtype, dtype, torch.int32, head_dim, head_dim)
        prefill.get_batch_prefill_module(family, *kind, 0, windowed, False, False)
        return prefill.BatchPrefillWithRaggedKVCacheWrapper

    key = ("flashinfer", "ragged prefill", family, dtype, head_dim, windowed)
    what = f"FlashInfer's batched prefill {family} for {dtype}, head_dim {head_dim}"
    return once(key, f"{what}, windowed" if windowed else what, build)


class _Plan:
    """A planned wrapper; `streams` have run it outside of captures."""

    def __init__(self, shape: Shape) -> None:
        wrapper = load(shape.family, shape.dtype, shape.head_dim, shape.window_left >= 0)
        unused = torch.empty(16, dtype=torch.uint8, device=shape.device)  # for split keys: off
        self.wrapper = wrapper(unused, "NHD", backend=shape.family)
        # Seven ints for each tile of 64 queries and head, and offsets; by default it is 8 MiB.
        room = 64 * shape.batch * shape.heads * (shape.queries // 64 + 1) + 8192
        room += shape.batch * shape.queries * shape.heads
        scratch = torch.empty(room, dtype=torch.uint8, device=shape.device)
        self.wrapper.reset_workspace_buffer(unused, scratch)
        self.wrapper.plan(
            _offsets(shape.batch, shape.queries),
            _offsets(shape.batch, shape.keys),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
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
    """Attend; the tensors are flattened to ``[B * S, heads, D]``, copied where that takes it."""
    plan = _planned(shape)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    return plan.wrapper.run(*flat, return_lse=with_lse)


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
