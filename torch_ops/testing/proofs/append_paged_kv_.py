"""Proof of append_paged_kv_: what is written is found there, bit for bit, and all else is kept."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing import draw as pieces
from torch_ops.testing._hypothesis import DrawFn
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.arithmetic import contract_field
from torch_ops.testing.layouts import LAYOUTS
from torch_ops.testing.proof import Arguments, Law, Output, Pair, Proof, Shapes, Trial
from torch_ops.testing.proofs._append_faults import MUTANTS, slots_of
from torch_ops.testing.spec import Operand, Spec

OP = "append_paged_kv_"
ARGUMENTS = ("k", "v", "k_cache", "v_cache", "slot_mapping")
CACHES = ("k_cache", "v_cache")
REGIMES = ("normal", "rows", "zeros", "grid", "spiky", "huge", "tiny")
CACHE_LAYOUTS = ("contig", "unbind", "heads_first", "row_stride", "qkv_split", "misalign", "step2")
HELD = ((0, "nan"), (7, "inf"), (13, "-0"))  # by caches: they are kept like everything else
DIMS: dict[str, dict[str, int]] = {
    "one": {"tokens": 1, "pages": 1, "page_size": 1, "kv_heads": 1, "head_dim": 1},
    "decode": {"tokens": 5, "pages": 9, "page_size": 16, "kv_heads": 2, "head_dim": 64},
    "odd": {"tokens": 7, "pages": 3, "page_size": 13, "kv_heads": 3, "head_dim": 5},
    "full": {"tokens": 24, "pages": 3, "page_size": 8, "kv_heads": 1, "head_dim": 128},
    "flat": {"tokens": 33, "pages": 70, "page_size": 1, "kv_heads": 2, "head_dim": 8},
    "wide": {
        "tokens": 4, "pages": 2, "page_size": 4, "kv_heads": 2, "head_dim": 24, "value_dim": 40,
    },
    "far": {"tokens": 9, "pages": 66_000, "page_size": 1, "kv_heads": 1, "head_dim": 1},
}  # fmt: skip
# tokens, pages, kv_heads, head_dim; pages of 16 tokens
NAMED = ((1, 64, 8, 128), (128, 512, 8, 128), (8192, 1024, 8, 128), (7, 2, 3, 64), (16, 4, 4, 256))
AXES: dict[str, Sequence[Any]] = {
    "layout": LAYOUTS,
    "dims": tuple(DIMS),
    "cache": CACHE_LAYOUTS,
    "regime": REGIMES,
    "skipped": ("none", "some", "all"),
    "held": ((), HELD),
}


def shapes(spec: Spec) -> Shapes:
    """Rows ``[T, K, D]``, caches ``[P, page_size, K, D]``, a slot a row."""
    d = spec.dim
    heads, slots = (d["tokens"], d["kv_heads"]), (d["pages"], d["page_size"], d["kv_heads"])
    key, value = d["head_dim"], d.get("value_dim", d["head_dim"])
    return {
        "k": (*heads, key), "v": (*heads, value), "k_cache": (*slots, key),
        "v_cache": (*slots, value), "slot_mapping": heads[:1],
    }  # fmt: skip


def fill(spec: Spec, name: str, values: Tensor) -> Tensor:
    """Slots, all different, the upper ones first; a skipped row has a negative one."""
    if name != "slot_mapping":
        return values
    d = spec.dim
    count, pool = len(values), d["pages"] * d["page_size"]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{spec.seed}/slots".encode()))
    slots = -1 - torch.arange(count)
    written = torch.randperm(count, generator=generator)[d.get("skipped", 0) :][:pool]
    upper = torch.randperm(min(2 * count, pool), generator=generator)[: len(written)]
    slots[written] = pool - 1 - upper
    return slots.to(values.dtype)


def _spec(dims: Mapping[str, int], looks: Mapping[str, Operand], dtype: str, seed: int = 0) -> Spec:
    plain = {name: Operand(dtype) for name in ARGUMENTS[:-1]}
    table = {"slot_mapping": Operand("int64", regime="first", high=1)}
    spec = Spec.of(OP, dims, plain | table | looks, seed=seed)
    return pieces.fitted(spec, shapes(spec), CACHES)


@st.composite
def draw(draw: DrawFn, dtype: str, budget: int) -> Spec:
    """Specs in which some rows are skipped."""
    dims = {
        "page_size": draw(st.sampled_from((16, 1, 8, 64, 13, 4, 128))),
        "kv_heads": draw(st.sampled_from((1, 2, 3, 8))),
        "head_dim": draw(st.sampled_from((64, 1, 8, 16, 80, 128, 192))),
    }
    limit = max(budget // (dims["page_size"] * dims["kv_heads"] * dims["head_dim"]), 1)
    dims["pages"] = draw(st.integers(1, min(limit, 9)))
    most = min(dims["pages"] * dims["page_size"], 65)
    dims["tokens"] = draw(pieces.size(most))
    dims["skipped"] = draw(st.integers(0, min(dims["tokens"], 3)))
    if draw(st.integers(0, 3)) == 3:
        dims["value_dim"] = draw(st.sampled_from((16, 1, 24, 128)))
    shape = shapes(Spec.of(OP, dims, {}))
    looks = {name: draw(pieces.operand(dtype, shape[name], REGIMES)) for name in ("k", "v")}
    for name in CACHES:
        layout = draw(st.sampled_from(CACHE_LAYOUTS))
        looks[name] = Operand(dtype, layout, specials=draw(st.sampled_from(((), HELD))))
    return _spec(dims, looks, dtype, draw(pieces.seeds()))


def row(dtype: str, choice: Mapping[str, Any]) -> Spec:
    """A row of the covering array."""
    dims = dict(DIMS[choice["dims"]])
    if choice["layout"] == "int64_stride":
        dims["kv_heads"] = 1
    dims["skipped"] = {"none": 0, "some": dims["tokens"] // 3, "all": dims["tokens"]}[
        choice["skipped"]
    ]
    others = ("contig", "row_stride", "transposed", "unbind", "misalign")
    looks = {
        "k": Operand(dtype, choice["layout"], choice["regime"]),
        "v": Operand(dtype, pieces.pick(choice, "v", others)),
        "k_cache": Operand(dtype, choice["cache"], specials=choice["held"]),
        "v_cache": Operand(dtype, pieces.pick(choice, "v_cache", CACHE_LAYOUTS)),
        "slot_mapping": Operand(
            "int64", pieces.pick(choice, "slots", ("contig", "step2", "misalign")), "first", 1
        ),
    }
    return _spec(dims, looks, dtype, seed=1)


def zero(dtype: str) -> list[Spec]:
    """No rows, no pages and so no slots, no heads, no elements in a head."""
    return [
        _spec(DIMS["odd"] | {name: 0}, {"k_cache": Operand(dtype, layout)}, dtype)
        for name in ("tokens", "pages", "kv_heads", "head_dim")
        for layout in ("contig", "row_stride")
    ]


def classes(dtype: str) -> list[Spec]:
    """NaN and infinities are written like everything else."""
    return [
        _spec(DIMS["odd"], {"k": Operand(dtype, specials=((3, special),))}, dtype)
        for special in ("nan", "inf", "-inf", "-0")
    ]


def named(dtype: str) -> dict[str, Spec]:
    """Caches of models, as ``tokens in pages, heads x head_dim``."""
    found = {}
    for tokens, pages, kv_heads, head_dim in NAMED:
        dims = {
            "tokens": tokens, "pages": pages, "page_size": 16, "kv_heads": kv_heads,
            "head_dim": head_dim,
        }  # fmt: skip
        found[f"{tokens} in {pages}, {kv_heads}x{head_dim}"] = _spec(dims, {}, dtype)
    return found


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """The caches with the rows in their slots: copies, so that every bit is known."""
    contract_field(contract, "negative_slot", "skipped")
    contract_field(contract, "others", "unchanged")
    page, offset, rows = slots_of(args["slot_mapping"], args["k_cache"].shape[1])
    found = []
    for name, source in (("k_cache", "k"), ("v_cache", "v")):
        cache = args[name].double()
        cache[page, offset] = args[source].double()[rows]
        found.append(Output(name, cache, None, args[name].dtype))
    return tuple(found)


def _both(what: str, got: Sequence[Tensor], expected: Sequence[Tensor]) -> list[Pair]:
    return [Pair(f"{n}, {what}", a, b) for n, a, b in zip(CACHES, got, expected, strict=True)]


def _read_back(trial: Trial) -> Sequence[Pair] | None:
    page, offset, rows = slots_of(trial.args["slot_mapping"], trial.args["k_cache"].shape[1])
    if not len(rows):
        return None
    got = [cache[page, offset] for cache in trial.outputs]
    return _both("what was written", got, [trial.args[name][rows] for name in ("k", "v")])


def _untouched(trial: Trial) -> Sequence[Pair]:
    caches = [trial.args[name] for name in CACHES]
    page, offset, _ = slots_of(trial.args["slot_mapping"], caches[0].shape[1])
    kept = torch.ones(caches[0].shape[:2], dtype=torch.bool, device=caches[0].device)
    kept[page, offset] = False
    return _both("the rest", [c[kept] for c in trial.outputs], [c[kept] for c in caches])


def _order(trial: Trial) -> Sequence[Pair] | None:
    if len(trial.args["slot_mapping"]) < 2:
        return None
    changed = {name: trial.args[name].flip(0) for name in ("k", "v", "slot_mapping")}
    return _both("rows reversed", trial.run(**changed), trial.outputs)


def _in_parts(trial: Trial) -> Sequence[Pair] | None:
    """Each row's slot is its own: the number of rows of a call is nothing to it."""
    count = len(trial.args["slot_mapping"])
    if count < 2:
        return None
    caches: dict[str, Tensor] = {}
    for part in (slice(0, count // 2), slice(count // 2, None)):
        rows = {name: trial.args[name][part] for name in ("k", "v", "slot_mapping")}
        caches = dict(zip(CACHES, trial.run(**rows, **caches), strict=True))
    return _both("in two calls", tuple(caches.values()), trial.outputs)


def _skipped(trial: Trial) -> Sequence[Pair] | None:
    """Neither what a skipped row holds nor which negative slot it has is anything to anyone."""
    slots = trial.args["slot_mapping"]
    gone = slots < 0
    if not bool(gone.any()):
        return None
    rows = {n: trial.args[n].masked_fill(gone.view(-1, 1, 1), torch.nan) for n in ("k", "v")}
    other = torch.where(gone, slots * 3 - 1, slots)
    return _both("other skipped rows", trial.run(slot_mapping=other, **rows), trial.outputs)


LAWS = (
    Law("read_back", "a row is found in its slot", _read_back),
    Law("untouched", "all other slots are kept", _untouched),
    Law("order", "the order of rows is nothing to a cache", _order),
    Law("in_parts", "f(a, b) == f(b) after f(a)", _in_parts, declared="batch_invariant"),
    Law("skipped", "a row with a negative slot is nothing to a cache", _skipped),
)

proof = Proof(
    op=OP,
    arguments=ARGUMENTS,
    shapes=shapes,
    draw=draw,
    axes=AXES,
    row=row,
    zero=zero,
    classes=classes,
    named=named,
    oracle=oracle,
    laws=LAWS,
    mutants=MUTANTS,
    fill=fill,
    mutates=CACHES,
    cost=4,
)
