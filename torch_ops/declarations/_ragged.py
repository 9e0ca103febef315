"""What attention over sequences of different lengths shares: places, mask, reference, checks.

Sequence b has the rows ``indptr[b]`` to ``indptr[b + 1]`` of a packed tensor.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from torch_ops import checks, dynamo
from torch_ops.declarations import _attention

__all__ = [
    "attend",
    "check_bounds",
    "check_index",
    "check_indptr",
    "check_packed",
    "lengths",
    "longest",
    "reference",
    "rows_of",
    "take",
]


def lengths(indptr: Tensor) -> Tensor:
    """Give how many rows each sequence has, ``[B]`` int64."""
    return (indptr[1:] - indptr[:-1]).long()


def longest(indptr: Tensor, most: int) -> int:
    """Bound the length of the longest sequence, at most by ``most``.

    Exact where reading it waits for no device and is seen by no tracer: tables get no larger than
    they have to.
    """
    if torch.compiler.is_dynamo_compiling() or indptr.device.type != "cpu":
        return most
    if dynamo.watched(indptr):
        return most
    found: list[int] = lengths(indptr).tolist()
    return min(most, max([0, *found]))


def rows_of(indptr: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Give the row of step i of each sequence and whether there is one, ``[B, most]`` each.

    A step past its sequence's end has row 0.
    """
    step = torch.arange(most, device=indptr.device)
    inside = step < lengths(indptr).unsqueeze(1)
    return (indptr[:-1].long().unsqueeze(1) + step).masked_fill(~inside, 0), inside


def take(x: Tensor, rows: Tensor, inside: Tensor) -> Tensor:
    """Gather rows; those that aren't ``inside`` are zeros, whatever was read for them."""
    if x.shape[0] == 0:
        return x.new_zeros((*rows.shape, *x.shape[1:]))
    return _kept(x[rows], inside)


def _kept(x: Tensor, inside: Tensor) -> Tensor:
    return x.masked_fill(~inside.view(*inside.shape, *[1] * (x.dim() - inside.dim())), 0)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    max_qo_len: int,
    max_kv_len: int,
    is_causal: bool,
    scale: float | None,
    window_left: int,
    logits_soft_cap: float,
) -> tuple[Tensor, Tensor]:
    """Attend packed queries to packed keys; gives ``[T, H, Dv]`` and the LSE ``[T, H]``."""
    keys = longest(kv_indptr, torch.sym_min(max_kv_len, k.shape[0]))
    places = rows_of(kv_indptr, keys)
    queries = longest(qo_indptr, torch.sym_min(max_qo_len, q.shape[0]))
    k, v = take(k, *places), take(v, *places)
    numbers = is_causal, scale, window_left, logits_soft_cap
    return attend(q, k, v, qo_indptr, lengths(kv_indptr), queries, *numbers)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    kv_lengths: Tensor,
    most: int,
    is_causal: bool,
    scale: float | None,
    window_left: int,
    logits_soft_cap: float,
) -> tuple[Tensor, Tensor]:
    """Attend packed queries, at most ``most`` a sequence, to keys ``[B, S_kv, K, D]``."""
    rows, inside = rows_of(qo_indptr, most)
    shift = (kv_lengths - lengths(qo_indptr)).view(-1, 1, 1)
    query = torch.arange(most, device=q.device).view(1, -1, 1) + shift
    key = torch.arange(k.shape[1], device=q.device).view(1, 1, -1)
    seen = key < kv_lengths.view(-1, 1, 1)
    if is_causal:
        seen = seen & (key <= query)
    if window_left >= 0:
        seen = seen & (query - key <= window_left)
    mask = seen.expand(-1, most, -1).unsqueeze(1).unsqueeze(1)
    out, lse = _attention.attend(take(q, rows, inside), k, v, mask, scale, logits_soft_cap)
    return _packed(out, lse, qo_indptr, q.shape[0])


def _packed(out: Tensor, lse: Tensor, indptr: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Put ``[B, most, ...]`` back into rows; a row of no sequence is zeros with an LSE of -inf."""
    batch, most = out.shape[:2]
    row = torch.arange(count, device=out.device)
    edges = indptr.long().contiguous()
    owner = (torch.searchsorted(edges, row, right=True) - 1).clamp(min=0)
    step = row - edges[owner]
    inside = (owner < batch) & (step < most)
    place = (owner * most + step).masked_fill(~inside, 0)
    values = take(out.flatten(0, 1), place, inside)
    sums = take(lse.flatten(0, 1), place, inside)
    return values, sums.masked_fill(~inside.unsqueeze(1), float("-inf"))


def check_packed(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    max_qo_len: int,
    max_kv_len: int,
    scale: float | None,
    window_left: int,
    logits_soft_cap: float,
) -> None:
    """Refuse tensors that don't fit together and numbers out of range."""
    checks.float_dtype(op, "q", q)
    checks.rank(op, "q", q, 3, "[T, H, D]")
    _, heads, head_dim = q.shape
    if k.dim() != 3 or k.shape[2] != head_dim:
        checks.refuse(op, "k", f"of shape {list(k.shape)}", f"[N, K, {head_dim}], D of 'q'")
    if v.dim() != 3 or v.shape[:2] != k.shape[:2]:
        wanted = f"{[*k.shape[:2], 'D']}, N and K of 'k'"
        checks.refuse(op, "v", f"of shape {list(v.shape)}", wanted)
    _attention.check_heads(op, "k", heads, k.shape[1])
    checks.like(op, "k", k, q, "q")
    checks.like(op, "v", v, q, "q")
    check_index(op, "qo_indptr", qo_indptr, q)
    if qo_indptr.shape[0] == 0:
        checks.refuse(op, "qo_indptr", "of shape [0]", "[B + 1]")
    check_index(op, "kv_indptr", kv_indptr, q)
    if kv_indptr.shape != qo_indptr.shape:
        checks.shape(op, "kv_indptr", kv_indptr, qo_indptr.shape, "[B + 1] of 'qo_indptr'")
    for name, most in (("max_qo_len", max_qo_len), ("max_kv_len", max_kv_len)):
        if most < 0:
            checks.refuse(op, name, repr(most), "a number >= 0")
    _attention.check_numbers(op, head_dim, scale, window_left, logits_soft_cap)


def check_index(op: str, argument: str, index: Tensor, q: Tensor, name: str = "q") -> None:
    """Refuse what is no vector of int32 on the device of ``q``, which is called ``name``."""
    if index.dtype != torch.int32:
        checks.refuse(op, argument, index.dtype, "torch.int32", kind=TypeError)
    if index.dim() != 1:
        checks.rank(op, argument, index, 1, "a vector")
    if index.device != q.device:
        checks.refuse(op, argument, f"on device {index.device}", f"{q.device}, as {name!r}")


def check_indptr(op: str, argument: str, indptr: Tensor, rows: int, what: str) -> None:
    """Refuse bounds that don't rise from 0 to at most ``rows``; reads the data."""
    bounds = indptr.tolist()
    rises = all(a <= b for a, b in itertools.pairwise(bounds))
    if bounds[0] != 0 or not rises or bounds[-1] > rows:
        accepted = f"numbers that never fall, from 0 to at most {rows}, {what}"
        checks.refuse(op, argument, _shown(bounds), accepted)


def check_bounds(
    op: str,
    q: Tensor,
    k: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    max_qo_len: int,
    max_kv_len: int,
) -> None:
    """Refuse bounds that leave their tensors, or are longer than was said; reads the data."""
    check_indptr(op, "qo_indptr", qo_indptr, q.shape[0], "the rows of 'q'")
    check_indptr(op, "kv_indptr", kv_indptr, k.shape[0], "the rows of 'k'")
    _check_most(op, "max_qo_len", max_qo_len, qo_indptr, "qo_indptr")
    _check_most(op, "max_kv_len", max_kv_len, kv_indptr, "kv_indptr")


def _check_most(op: str, argument: str, most: int, indptr: Tensor, name: str) -> None:
    """Refuse a bound that a sequence is longer than; reads the data."""
    length = max(lengths(indptr).tolist(), default=0)
    if most < length:
        accepted = f"a number >= {length}, the longest sequence of {name!r}"
        checks.refuse(op, argument, repr(most), accepted)


def _shown(numbers: list[int]) -> str:
    return repr(numbers) if len(numbers) <= 16 else f"{numbers[:8]!r} and so on"
