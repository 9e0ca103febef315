"""Dense attention by FlashInfer's prefill kernels, FA2 or FA3, and what they can't take.

Masked logits are -50000 before the scale: logits of a query below that would count as masked.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops import limits, policy
from torch_ops.once import once
from torch_ops.platform import Platform

from . import _modules, _ragged

__all__ = ["Call", "apart", "attend", "family", "layout", "load", "refusal", "unfit"]

HEAD_DIMS = (64, 128, 256)
MIN_SCALE = 1e-3  # a masked logit then weighs less than 2**-72 of the largest one
_LOG_2 = math.log(2)


def family(device: torch.device) -> str:
    """Give the newer of the two families that the GPU has the instructions of."""
    return "fa2" if _no_fa3(device) else "fa3"


def _no_fa3(device: torch.device) -> str | None:
    return _judged(device, policy.generation)


@functools.lru_cache(maxsize=16)
def _judged(device: torch.device, generation: int) -> str | None:
    """Judge once until something changes, ``refresh()`` included."""
    platform = Platform.detect(device)
    if platform.capability != (9, 0):
        return f"arch {platform.arch} (supported by FA3: sm_90)"
    built = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    if built < (12, 3):
        return f"CUDA {torch.version.cuda} (supported by FA3: 12.3 and newer)"
    return None


def unfit(name: str, device: torch.device) -> str | None:
    """Give why a family can't run on a GPU."""
    return _no_fa3(device) if name == "fa3" else None


def refusal(dtype: torch.dtype, head_dim: int, scale: float | None, soft_cap: float) -> str | None:
    """Give why no call of this kind can be served, whatever its tensors."""
    if dtype not in limits.HALVES:
        return f"q dtype {dtype} (supported: {', '.join(map(str, limits.HALVES))})"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} (supported: {', '.join(map(str, HEAD_DIMS))})"
    if soft_cap > 0:
        return (
            f"logits_soft_cap {soft_cap} (supported: 0.0; tanh.approx.f32 has a relative error of "
            "2**-11, the op's contract: float32)"
        )
    if scale is not None and scale < MIN_SCALE:
        return f"scale {scale} (supported: at least {MIN_SCALE}, masked logits being -50000)"
    return None


def layout(name: str, x: Tensor) -> str | None:
    """Give why a ``[B, S, heads, D]`` tensor can't be read where it lies."""
    batch, tokens, heads, last = x.stride()
    sequences, length = x.shape[:2]
    if sequences > 1:
        if length == 1:
            tokens = batch
        elif batch != length * tokens:
            return limits.strides(name, x, "sequences one after another in a batch")
    if last != 1 or (tokens | heads) & 7 or not (tokens and heads):
        return limits.strides(name, x, "1 for the last axis, multiples of 8 for the others")
    if x.data_ptr() & 15:
        return limits.misaligned(name, x, "16")
    span = sequences * length * tokens
    if span > limits.OFFSETS:
        return f"{name} spans {span} elements (supported: up to {limits.OFFSETS})"
    return None


def apart(name: str, is_causal: bool, k: Tensor, v: Tensor) -> str | None:
    """Give why a family can't read a batch's keys and values: as pages they lie alike."""
    if _in_pages(name, is_causal, k) and _ragged.steps(k) != _ragged.steps(v):
        return limits.strides("v", v, f"{k.stride()}, those of k")
    return None


def _in_pages(name: str, is_causal: bool, k: Tensor) -> bool:
    """Whether sequences have to be pages, for none to read what is the next one's."""
    batch, keys, _, head_dim = k.shape
    return name == "fa3" and batch > 1 and keys % _ragged.tile(head_dim, is_causal) > 0


def load(name: str, dtype: torch.dtype, head_dim: int, windowed: bool) -> None:
    """Load or compile what `attend` runs for single sequences and for batches of them."""
    _single(name, dtype, head_dim, windowed)
    _ragged.load(name, dtype, head_dim, windowed)


@functools.cache
def _single(name: str, dtype: torch.dtype, head_dim: int, windowed: bool) -> Any:
    """Give the function for one sequence, once the kernel that it will run is loaded."""

    def build() -> Any:
        prefill = _modules.package("prefill")
        kind = (dtype, dtype, dtype, head_dim, head_dim)
        prefill.get_single_prefill_module(name, *kind, 0, windowed, False, False)
        return prefill.single_prefill_with_kv_cache

    key = ("flashinfer", "single prefill", name, dtype, head_dim, windowed)
    what = f"FlashInfer's prefill {name} for {dtype}, head_dim {head_dim}"
    return once(key, f"{what}, windowed" if windowed else what, build)


class Call(NamedTuple):
    """What a call asks for besides its tensors.

    Attributes:
        family: ``"fa2"`` or ``"fa3"``.
        is_causal, scale, window_left: As in the op.
        with_lse: Whether the LSE is wanted.
    """

    family: str
    is_causal: bool
    scale: float | None
    window_left: int
    with_lse: bool


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """Give ``[B, S, H, D]`` and, where it is wanted, the LSE ``[B, S, H]``."""
    queries, keys = q.shape[1], k.shape[1]
    empty = max(queries - keys, 0) if call.is_causal or not keys else 0
    if not empty and q.numel():
        return _attend(call, q, k, v)
    # Queries that stand before the first key attend to nothing.
    out = q.new_zeros(q.shape)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=torch.float32) if call.with_lse else None
    if empty < queries and q.numel():
        seen, seen_lse = _attend(call, q[:, empty:], k, v)
        out[:, empty:] = seen
        if lse is not None and seen_lse is not None:
            lse[:, empty:] = seen_lse
    return out, lse


def _attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """Attend where every query has a key."""
    batch, queries, heads, head_dim = q.shape
    keys = k.shape[1]
    scale = head_dim**-0.5 if call.scale is None else call.scale
    window_left = min(call.window_left, keys)
    if batch > 1:
        shape = _ragged.Shape(
            q.device, call.family, q.dtype, batch, queries, keys, heads, k.shape[2], head_dim,
            call.is_causal, window_left, scale, _in_pages(call.family, call.is_causal, k),
        )  # fmt: skip
        result = _ragged.run(shape, q, k, v, call.with_lse)
    else:
        result = _single(call.family, q.dtype, head_dim, window_left >= 0)(
            q[0],
            k[0],
            v[0],
            causal=call.is_causal,
            sm_scale=scale,
            window_left=window_left,
            backend=call.family,
            return_lse=call.with_lse,
        )
    if not call.with_lse:
        return result.view(q.shape), None
    out, lse = result
    return out.view(q.shape), lse.mul_(_LOG_2).view(q.shape[:3])  # it is a logarithm in base 2
