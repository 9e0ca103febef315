"""Sequences of different lengths by FlashInfer's batched prefill, planned in the call.

A plan needs the lengths on the host: a call waits for the GPU, and no CUDA graph can capture it.
Sequences without keys, and queries before the first key, are left out of what FlashInfer sees.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops import limits, locks
from torch_ops.errors import CaptureError
from torch_ops.once import capturing

from . import _modules, _prefill, _ragged

__all__ = [
    "LOCK",
    "ROOM",
    "Call",
    "Lengths",
    "Table",
    "attend",
    "layout",
    "offsets",
    "read",
    "refusal",
    "refuse_capture",
    "wrapper",
]

ROOM = 128 << 20  # bytes for parts of split keys, as FlashInfer recommends
_LOG_2 = math.log(2)
LOCK = locks.lock()
"""Held while a wrapper plans and runs: a wrapper's plan is that of its next run."""
_wrappers: dict[tuple[Any, ...], Any] = {}


class Call(NamedTuple):
    """What a call asks for besides its tensors.

    Attributes:
        op: Named in messages.
        family: ``"fa2"`` or ``"fa3"``.
        is_causal, scale, window_left: As in the op.
        with_lse: Whether the LSE is wanted.
    """

    op: str
    family: str
    is_causal: bool
    scale: float | None
    window_left: int
    with_lse: bool


class Table(NamedTuple):
    """Where sequences are, as in the ops; kv_indices and kv_last_page_len of pages alone.

    Attributes:
        qo_indptr: None where each sequence has one query.
    """

    qo_indptr: Tensor | None
    kv_indptr: Tensor
    kv_indices: Tensor | None = None
    kv_last_page_len: Tensor | None = None


class Lengths(NamedTuple):
    """Host copies: starts of queries and of keys or pages, and numbers of keys."""

    queries: list[int]
    starts: list[int]
    keys: list[int]
    last: list[int]


def refusal(
    q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str], scale: float | None, soft_cap: float
) -> str | None:
    """Give why a call can't be served.

    Args:
        names: Those of keys and values, packed or in pages.
    """
    reason = _prefill.refusal(q.dtype, q.shape[-1], scale, soft_cap)
    if reason is not None:
        return reason
    if v.shape[-1] != q.shape[-1]:
        return f"head_dim {v.shape[-1]} of {names[1]} (supported: {q.shape[-1]}, that of q)"
    if not (q.numel() and k.numel()):
        return None
    for name, x in zip(("q", *names), (q, k, v), strict=True):
        reason = layout(name, x)
        if reason is not None:
            return reason
    pages = k.dim() == 4 or _prefill.family(q.device) == "fa3"
    if pages and _ragged.steps(k) != _ragged.steps(v):
        return limits.strides(names[1], v, f"{k.stride()}, those of {names[0]}")
    return None


def layout(name: str, x: Tensor, *, pages: bool = False) -> str | None:
    """Give why a tensor can't be read where it lies; where pages begin is counted in 64 bits."""
    *steps, last = x.stride()
    used = [step for size, step in zip(x.shape, steps, strict=False) if size > 1]
    if last != 1 or any(step & 7 or not step for step in used):
        return limits.strides(name, x, "1 for the last axis, multiples of 8 for the others")
    if x.data_ptr() & 15:
        return limits.misaligned(name, x, "16")
    longest = max(used, default=0) * (1 if pages or x.dim() == 4 else x.shape[0])
    if longest > limits.OFFSETS:
        return f"{name} spans {longest} elements (supported: up to {limits.OFFSETS})"
    return None


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor, table: Table) -> tuple[Tensor, Any]:
    """Give ``[T, H, D]`` and, where it is wanted, the LSE ``[T, H]``."""
    out = q.new_zeros(q.shape)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float32) if call.with_lse else None
    batch = table.kv_indptr.shape[0] - 1
    listed = k.shape[0] if table.kv_indices is None else table.kv_indices.shape[0]
    if not (q.numel() and k.numel() and batch and listed):
        return out, lse
    refuse_capture(call.op, "let an Attention layer plan its metadata before the capture, or take")
    lengths = read(table, k.shape[1] if k.dim() == 4 else 0)
    if table.kv_indices is None and call.family == "fa3":
        k, v, table, lengths = _in_pages(k, v, table, lengths)
    q, k, v = map(_ragged.usual, (q, k, v))
    rows = _seeing(lengths, call.is_causal)
    counts = [len(each) for each in rows]
    if not any(counts):
        return out, lse
    if sum(counts) == q.shape[0]:
        found, found_lse = _run(call, q, k, v, table, lengths, counts)
        return found, found_lse
    chosen = torch.tensor([*itertools.chain(*rows)], device=q.device)
    found, found_lse = _run(call, q[chosen], k, v, table, lengths, counts)
    out[chosen] = found
    if lse is not None and found_lse is not None:
        lse[chosen] = found_lse
    return out, lse


def _in_pages(
    k: Tensor, v: Tensor, table: Table, lengths: Lengths
) -> tuple[Tensor, Tensor, Table, Lengths]:
    """Make each packed key a page, for no sequence to read what is the next one's."""
    indices = torch.arange(lengths.starts[-1], dtype=torch.int32, device=k.device)
    lengths = lengths._replace(last=[min(count, 1) for count in lengths.keys])
    return k.unsqueeze(1), v.unsqueeze(1), table._replace(kv_indices=indices), lengths


def refuse_capture(op: str, what: str) -> None:
    """Refuse to plan while a stream is capturing; ``what`` to do, before "another backend".

    Raises:
        CaptureError: a stream is capturing.
    """
    if capturing():
        raise CaptureError(
            f"op {op!r}: FlashInfer plans each call on the host by lengths that it reads from "
            f"the GPU, and a stream is capturing; prepare first: {what} another backend"
        )


def read(table: Table, page_size: int) -> Lengths:
    """Copy what is needed of the table to the host, at once."""
    parts = [t for t in (table.qo_indptr, table.kv_indptr, table.kv_last_page_len) if t is not None]
    numbers = iter(torch.cat(parts).tolist())
    batch = table.kv_indptr.shape[0] - 1
    one_each = table.qo_indptr is None
    queries = [*range(batch + 1)] if one_each else [*itertools.islice(numbers, batch + 1)]
    starts = [*itertools.islice(numbers, batch + 1)]
    last = [*numbers]
    counts = [end - start for start, end in itertools.pairwise(starts)]
    if not page_size:
        return Lengths(queries, starts, counts, last)
    # FlashInfer adds the last page's length for a sequence without pages, too.
    last = [length if count else 0 for count, length in zip(counts, last, strict=True)]
    keys = [max(count - 1, 0) * page_size + n for count, n in zip(counts, last, strict=True)]
    return Lengths(queries, starts, keys, last)


def _seeing(lengths: Lengths, is_causal: bool) -> list[range]:
    """Give the rows of each sequence's queries that see a key."""
    found = []
    for (start, end), keys in zip(itertools.pairwise(lengths.queries), lengths.keys, strict=True):
        blind = max(end - start - keys, 0) if is_causal else 0
        found.append(range(start + blind, end) if keys else range(0))
    return found


def _run(
    call: Call, q: Tensor, k: Tensor, v: Tensor, table: Table, lengths: Lengths,
    counts: Sequence[int],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Plan and run; rows of q are those of the sequences, ``counts`` of each."""
    _ragged.load(call.family, q.dtype, q.shape[2], call.window_left >= 0)
    options = {
        "causal": call.is_causal,
        "window_left": min(call.window_left, max(lengths.keys)),
        "sm_scale": q.shape[2] ** -0.5 if call.scale is None else call.scale,
        "q_data_type": q.dtype,
        "kv_data_type": q.dtype,
    }
    heads = (q.shape[1], k.shape[-2], q.shape[2])
    kind = "Paged" if k.dim() == 4 else "Ragged"
    bounds = (offsets(counts), torch.tensor(lengths.starts, dtype=torch.int32))
    with LOCK:
        planned = wrapper(f"BatchPrefillWith{kind}KVCacheWrapper", call.family, q.device, "NHD")
        if table.kv_indices is None:
            planned.plan(*bounds, *heads, **options)
            result = planned.run(q, k, v, return_lse=call.with_lse)
        else:
            pages = (table.kv_indices.contiguous(), torch.tensor(lengths.last, dtype=torch.int32))
            planned.plan(*bounds, *pages, *heads, k.shape[1], **options)
            result = planned.run(q, (k, v), return_lse=call.with_lse)
    if not call.with_lse:
        return result, None
    out, lse = result
    return out, lse.mul_(_LOG_2)  # it is a logarithm in base 2


def offsets(counts: Sequence[int]) -> Tensor:
    """Give where each of so many begins, and the end, on the host."""
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


def wrapper(name: str, family: str, device: torch.device, *layout: str) -> Any:
    """Give the wrapper of this stream: another stream's runs may still read what a plan changes."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (name, family, device, stream)
    if key not in _wrappers:
        room = torch.zeros(ROOM, dtype=torch.uint8, device=device)
        package = _modules.package("mla" if "MLA" in name else "prefill")
        _wrappers[key] = getattr(package, name)(room, *layout, backend=family)
    return _wrappers[key]
