"""Calls of the paged ops: their page tables, what is right, and FlashInfer as a peer."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.triton_attention import Case as Dense
from benchmarks.triton_attention import exact

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
DTYPE = torch.bfloat16
_WORKSPACE = 256 << 20

Args = dict[str, Any]
Call = Callable[[], Tensor | None]


class Case(NamedTuple):
    """A call of a paged op, with pages in random order.

    Attributes:
        op: The op.
        name: What the call is called.
        lengths: Keys of each sequence.
        queries: Queries of each sequence, or keys to append to it.
    """

    op: str
    name: str
    lengths: tuple[int, ...]
    queries: int = 1

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values that are read, or read and written by an append."""
        row = 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize
        if self.op == "append_paged_kv_":
            return 2 * row * self.queries * len(self.lengths)
        return row * sum(self.lengths)

    @property
    def flops(self) -> int:
        """Operations on the pairs of a query and a key that it sees."""
        n = self.queries
        pairs = sum(n * keys - n * (n - 1) // 2 for keys in self.lengths)
        return 4 * HEADS * HEAD_DIM * pairs


DECODES = (
    Case("paged_decode", "b1x4k", (4096,)),
    Case("paged_decode", "b16x4k", (4096,) * 16),
    Case("paged_decode", "b128x4k", (4096,) * 128),
    Case("paged_decode", "b256x1k", (1024,) * 256),
    Case("paged_decode", "b64, one of 64k", (65536, *(1000,) * 63)),
)
OTHERS = (
    Case("paged_prefill", "b1x4k", (4096,), 4096),
    Case("paged_prefill", "b8x512 of 4k", (4096,) * 8, 512),
    Case("paged_prefill", "b64x4 of 2k", (2048,) * 64, 4),
    Case("append_paged_kv_", "b128x1", (4096,) * 128, 1),
    Case("append_paged_kv_", "b1x8k", (8192,), 8192),
)
SMALL = (
    Case("paged_decode", "b3", (70, 5, 33)),
    Case("paged_prefill", "b2x5", (40, 7), 5),
    Case("append_paged_kv_", "b2x5", (40, 7), 5),
)


def make(case: Case, device: torch.device) -> Args:
    """Make a call's arguments, in the op's order; what no sequence lists is NaN."""
    torch.manual_seed(0)
    batch, lengths = len(case.lengths), torch.tensor(case.lengths)
    pages = (lengths + PAGE - 1) // PAGE
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), pages.cumsum(0)])
    listed = int(indptr[-1])
    ids = torch.randperm(listed + 1)[:listed]
    shape = (listed + 1, PAGE, KV_HEADS, HEAD_DIM)
    caches = [torch.randn(shape, device=device, dtype=DTYPE) for _ in "kv"]
    last = lengths - (pages - 1) * PAGE
    for cache in caches:
        unlisted = torch.ones(listed + 1, dtype=torch.bool)
        unlisted[ids] = False
        cache[unlisted.to(device)] = torch.nan
        for page, used in zip(ids[indptr[1:] - 1].tolist(), last.tolist(), strict=True):
            cache[page, used:] = torch.nan
    q = torch.randn(batch * case.queries, HEADS, HEAD_DIM, device=device, dtype=DTYPE)
    caches_by_name = {"k_cache": caches[0], "v_cache": caches[1]}
    if case.op == "append_paged_kv_":
        new = [torch.randn_like(q[:, :KV_HEADS]) for _ in "kv"]
        slots = _slots(case, ids, indptr).to(device)
        return {"k": new[0], "v": new[1], **caches_by_name, "slot_mapping": slots}
    table = {
        "kv_indptr": indptr.int().to(device),
        "kv_indices": ids.int().to(device),
        "kv_last_page_len": last.int().to(device),
    }
    if case.op == "paged_decode":
        return {"q": q, **caches_by_name, **table}
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * case.queries
    return {"q": q, **caches_by_name, "qo_indptr": starts, **table}


def _slots(case: Case, ids: Tensor, indptr: Tensor) -> Tensor:
    """Give where the last keys of each sequence are."""
    found = []
    for begin, keys in zip(indptr.tolist(), case.lengths, strict=False):
        place = torch.arange(keys - case.queries, keys)
        found.append(ids[begin + place // PAGE] * PAGE + place % PAGE)
    return torch.cat(found)


def misses(case: Case, args: Args, call: Call) -> str | None:
    """Run a call and compare it with float64, within the derived bound; gives what is wrong."""
    if case.op == "append_paged_kv_":
        return _misses_append(args, call)
    got = call()
    assert got is not None
    worst = 0.0
    for rows, want, bound in expected(case, args):
        found = got[rows].double()
        if not bool(found.isfinite().all()):
            return f"not finite in rows {rows.start} to {rows.stop - 1}"
        worst = max(worst, float(((found - want).abs() / bound).max()))
    return None if worst <= 1 else f"{worst:.3g} of the bound"


def _misses_append(args: Args, call: Call) -> str | None:
    before = []
    for name in ("k_cache", "v_cache"):
        rows = args[name].flatten(0, 1)
        rows[args["slot_mapping"]] = torch.nan
        before.append(rows.clone())
    call()
    for name, rows in zip("kv", before, strict=True):
        rows[args["slot_mapping"]] = args[name]
        if not torch.equal(
            args[f"{name}_cache"].flatten(0, 1).view(torch.int16), rows.view(torch.int16)
        ):
            return f"{name}_cache isn't what it was with the new rows at their places"
    return None


def expected(case: Case, args: Args) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Give rows of the output, what they are in float64, and how far they may be from it."""
    indptr = args["kv_indptr"].tolist()
    bounds = itertools.pairwise(indptr)
    for number, ((begin, end), keys) in enumerate(zip(bounds, case.lengths, strict=True)):
        ids = args["kv_indices"][begin:end].long()
        k, v = (args[name][ids].flatten(0, 1)[:keys][None] for name in ("k_cache", "v_cache"))
        rows = slice(number * case.queries, (number + 1) * case.queries)
        dense = Dense(1, case.queries, keys, HEADS, KV_HEADS, HEAD_DIM)
        out, _, bound, _ = exact(dense, args["q"][rows][None], k, v)
        yield rows, out[0], bound[0]


def peers(case: Case, args: Args) -> dict[str, Call]:
    """Give FlashInfer's own calls, planned."""
    if importlib.util.find_spec("flashinfer") is None or not args["k_cache"].is_cuda:
        return {}
    if case.op == "paged_decode":
        return {
            f"flashinfer {kind}": _decode(args, kind == "tensor") for kind in ("cuda", "tensor")
        }
    if case.op == "paged_prefill":
        return {f"flashinfer {kind}": _prefill(args, kind) for kind in ("fa2", "fa3")}
    return {}


def _decode(args: Args, tensor_cores: bool) -> Call:
    import flashinfer

    room = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=args["q"].device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        room, "NHD", use_tensor_cores=tensor_cores
    )
    table = (args["kv_indptr"], args["kv_indices"], args["kv_last_page_len"])
    wrapper.plan(*table, HEADS, KV_HEADS, HEAD_DIM, PAGE, q_data_type=DTYPE, kv_data_type=DTYPE)
    return lambda: wrapper.run(args["q"], (args["k_cache"], args["v_cache"]))


def _prefill(args: Args, family: str) -> Call:
    import flashinfer

    room = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=args["q"].device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(room, "NHD", backend=family)
    table = (args["qo_indptr"], args["kv_indptr"], args["kv_indices"], args["kv_last_page_len"])
    wrapper.plan(
        *table, HEADS, KV_HEADS, HEAD_DIM, PAGE, causal=True, q_data_type=DTYPE, kv_data_type=DTYPE
    )
    return lambda: wrapper.run(args["q"], (args["k_cache"], args["v_cache"]))
