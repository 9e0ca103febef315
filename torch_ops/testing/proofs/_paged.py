"""Proofs of attention to a paged cache: Specs whose table lists pages in any order.

Pages that no sequence lists, slots behind the last token and the end of the table hold what no
kernel may read: NaN, and indices that are none.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch
from torch import Tensor

from torch_ops.testing._hypothesis import DrawFn
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.proof import Arguments, Shapes
from torch_ops.testing.proofs._ragged import NUMBERS, Dims, Form, Run, bounds, lengths, sized
from torch_ops.testing.spec import Spec

NO_PAGE = 2**31 - 1
TABLES = ("kv_indptr", "kv_indices", "kv_last_page_len")
DIMS: dict[str, Dims] = {
    "one": sized([1], [1], kv_heads=1, group=1, head_dim=8, pad=0, page_size=1, spare=1),
    "decode": sized(
        [1, 1, 1, 1], [65, 16, 1, 33], kv_heads=2, group=4, head_dim=64, pad=1, page_size=16,
        spare=3,
    ),
    "ragged": sized(
        [3, 0, 7, 1, 5], [5, 4, 2, 0, 9], kv_heads=2, group=2, head_dim=16, pad=2, page_size=4,
        spare=5,
    ),
    "ends": sized(
        [0, 6, 0], [0, 17, 3], kv_heads=2, group=3, head_dim=24, pad=3, page_size=8, spare=4,
    ),
    "prefix": sized(
        [7, 2], [130, 40], kv_heads=1, group=3, head_dim=80, pad=1, page_size=64, spare=2,
    ),
    "tile": sized(
        [33, 17], [128, 26], kv_heads=1, group=2, head_dim=128, pad=0, page_size=13, spare=1,
    ),
    "far": sized(
        [3, 2], [5, 9], kv_heads=1, group=2, head_dim=1, pad=1, page_size=1, spare=66_000,
    ),
}  # fmt: skip


def pool_of(args: Arguments) -> tuple[int, int]:
    """How many pages the caches have, and how many tokens a page has."""
    pages, size = next(x.shape[:2] for name, x in args.items() if name.endswith("_cache"))
    return pages, size


def page_counts(spec: Spec) -> list[int]:
    """How many pages each sequence has."""
    size = spec.dim["page_size"]
    return [-(-n // size) for n in lengths(spec, "kv")]


def listed(spec: Spec) -> Tensor:
    """The pages of all sequences, one after the other: any of the upper ones, in any order."""
    count = sum(page_counts(spec))
    pool = count + spec.dim.get("spare", 0)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{spec.seed}/pages".encode()))
    return pool - 1 - torch.randperm(min(2 * count, pool), generator=generator)[:count]


def _shapes(spec: Spec) -> Shapes:
    d, count = spec.dim, sum(page_counts(spec))
    slots = (count + d.get("spare", 0), d["page_size"], d["kv_heads"])
    heads = (d["kv_heads"] * d["group"], d["head_dim"])
    return {
        "q": (sum(lengths(spec, "qo")) + d.get("pad", 0), *heads),
        "k_cache": (*slots, d["head_dim"]),
        "v_cache": (*slots, d.get("value_dim", d["head_dim"])),
        "qo_indptr": (d["batch"] + 1,),
        "kv_indptr": (d["batch"] + 1,),
        "kv_indices": (count + d.get("pad", 0),),
        "kv_last_page_len": (d["batch"],),
    }


def fill(spec: Spec, name: str, values: Tensor) -> Tensor:
    """Content of tables, and NaN where nothing may be read."""
    if name.endswith("_cache"):
        return _unread_as_nan(spec, values)
    if name == "q":
        values[sum(lengths(spec, "qo")) :] = torch.nan
        return values
    return _table(spec, name).to(values.dtype)


def _table(spec: Spec, name: str) -> Tensor:
    counts, size = page_counts(spec), spec.dim["page_size"]
    if name == "qo_indptr":
        return bounds(lengths(spec, "qo"))
    if name == "kv_indptr":
        return bounds(counts)
    if name == "kv_indices":
        return torch.cat([listed(spec), torch.full((spec.dim.get("pad", 0),), NO_PAGE)])
    # Of a sequence without pages nothing is read: not this either.
    last = [(n - 1) % size + 1 if n else size for n in lengths(spec, "kv")]
    return torch.tensor(last, dtype=torch.int64)


def _unread_as_nan(spec: Spec, values: Tensor) -> Tensor:
    size, pages = spec.dim["page_size"], listed(spec)
    read = torch.zeros(values.shape[:2], dtype=torch.bool)
    for (first, end), count in zip(
        zip(bounds(page_counts(spec))[:-1], bounds(page_counts(spec))[1:], strict=True),
        lengths(spec, "kv"), strict=True,
    ):  # fmt: skip
        token = torch.arange(count)
        read[pages[first:end][token // size], token % size] = True
    unread = ~read.view(*read.shape, *[1] * (values.dim() - read.dim()))
    return values.masked_fill(unread, torch.nan)


def runs(args: Arguments) -> list[Run]:
    """Sequences in pages."""
    (_, size), found = pool_of(args), list[Run]()
    table = [args[name].tolist() for name in ("kv_indptr", "kv_last_page_len")]
    rows = args["qo_indptr"].tolist()
    for b, last in enumerate(table[1]):
        first, end = table[0][b : b + 2]
        count = (end - first - 1) * size + last if first < end else 0
        token = torch.arange(count, device=args["kv_indices"].device)
        pages = args["kv_indices"][first:end].long()
        found.append(Run(slice(*rows[b : b + 2]), (pages[token // size], token % size)))
    return found


def decode_runs(args: Arguments) -> list[Run]:
    """Sequences in pages, of one query each."""
    return runs(args | {"qo_indptr": torch.arange(len(args["kv_indptr"]))})


def _decode_shapes(spec: Spec) -> Shapes:
    found = _shapes(spec)
    del found["qo_indptr"]
    return found | {"q": (spec.dim["batch"], *found["q"][1:])}


def _decode_fill(spec: Spec, name: str, values: Tensor) -> Tensor:
    return values if name == "q" else fill(spec, name, values)


PREFILL = Form(
    arguments=("q", "k_cache", "v_cache", "qo_indptr", *TABLES, *NUMBERS),
    keys="k_cache",
    values="v_cache",
    runs=runs,
    shapes=_shapes,
    fill=fill,
    dims=DIMS,
    tables=("qo_indptr", *TABLES),
    key_layouts=("contig", "unbind", "heads_first", "row_stride", "qkv_split", "misalign"),
)
DECODE = replace(
    PREFILL,
    arguments=("q", "k_cache", "v_cache", *TABLES, *NUMBERS[1:]),
    runs=decode_runs,
    shapes=_decode_shapes,
    fill=_decode_fill,
    dims={
        name: {n: size for n, size in dims.items() if not n.startswith("qo")}
        for name, dims in DIMS.items()
    },
    tables=TABLES,
)


def pages(draw: DrawFn) -> Dims:
    """Sizes of pages and of a pool that is larger than what is used."""
    return {
        "page_size": draw(st.sampled_from((16, 1, 8, 64, 3, 13, 4, 128))),
        "spare": draw(st.integers(0, 4)),
    }
