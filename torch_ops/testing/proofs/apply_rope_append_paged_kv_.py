"""Proof of apply_rope_append_paged_kv_: what both ops have to be, joined without a rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from torch_ops.testing import draw as pieces
from torch_ops.testing._hypothesis import DrawFn
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.layouts import LAYOUTS
from torch_ops.testing.proof import Arguments, Output, Proof, Shapes
from torch_ops.testing.proofs import _rope, append_paged_kv_
from torch_ops.testing.proofs._append_faults import slots_of
from torch_ops.testing.proofs._rope_append_faults import MUTANTS
from torch_ops.testing.proofs._rope_append_laws import LAWS
from torch_ops.testing.proofs.append_paged_kv_ import CACHE_LAYOUTS, CACHES, HELD
from torch_ops.testing.spec import Operand, Spec

OP = "apply_rope_append_paged_kv_"
ARGUMENTS = ("q", "k", "v", "cos_sin_cache", "positions", *CACHES, "slot_mapping", "is_neox")
MUTATES = ("q", *CACHES)
PAGES: dict[str, dict[str, int]] = {
    "one": {"pages": 1, "page_size": 1},
    "odd": {"pages": 3, "page_size": 13},
    "full": {"pages": 9, "page_size": 16},
    "partial": {"pages": 2, "page_size": 4, "value_dim": 40},
    "narrow": {"pages": 70, "page_size": 1},
    "none": {"pages": 1, "page_size": 3},
    "far": {"pages": 66_000, "page_size": 1},
}
DIMS = {
    **_rope.DIMS,
    "far": {"tokens": 9, "heads": 1, "kv_heads": 1, "head_dim": 2, "rotary_dim": 2},
}
AXES: dict[str, Sequence[Any]] = {
    **_rope.AXES,
    "layout": LAYOUTS,
    "regime": ("normal", "rows", "zeros", "wide", "huge", "spiky"),
    "dims": tuple(DIMS),
    "cache": CACHE_LAYOUTS,
    "skipped": ("none", "some", "all"),
    "held": ((), HELD),
}
# model of _rope.MODELS, tokens, pages of 16 tokens
NAMED = (
    ("llama3-8b", 1, 64), ("llama3-8b", 64, 512), ("llama3-8b", 8192, 1024),
    ("smollm2-135m", 7, 2), ("phi2", 8, 4), ("glm4-9b", 8, 4),
)  # fmt: skip


def shapes(spec: Spec) -> Shapes:
    """Shapes of the arguments of both ops."""
    return {**_rope.shapes(spec), **append_paged_kv_.shapes(spec)}


def _spec(
    dims: Mapping[str, int], looks: Mapping[str, Operand], dtype: str, is_neox: bool, seed: int = 0
) -> Spec:
    """In order of the signature, what isn't given plain."""
    plain = {name: Operand(dtype) for name in ARGUMENTS[:-1]}
    plain["cos_sin_cache"] = Operand("float32", regime="unit_circle")
    plain["positions"] = Operand("int64", regime="index", high=dims["max_position"])
    plain["slot_mapping"] = Operand("int64", regime="first", high=1)
    spec = Spec.of(OP, dims, {**plain, **looks}, {"is_neox": is_neox}, seed)
    return pieces.fitted(spec, shapes(spec), MUTATES)


@st.composite
def draw(draw: DrawFn, dtype: str, budget: int) -> Spec:
    """Specs of apply_rope, with pages; some rows are skipped."""
    turned = draw(_rope.strategy(OP, ("q",))(dtype, budget))
    dims = turned.dim | {"page_size": draw(st.sampled_from((16, 1, 8, 13, 4)))}
    limit = max(budget // (dims["page_size"] * dims["kv_heads"] * dims["head_dim"]), 1)
    dims["pages"] = draw(st.integers(1, min(limit, 9)))
    dims["skipped"] = draw(st.integers(0, min(dims["tokens"], 3)))
    if draw(st.integers(0, 3)) == 3:
        dims["value_dim"] = draw(st.sampled_from((16, 1, 24, 128)))
    looks = turned.operand
    shape = append_paged_kv_.shapes(Spec.of(OP, dims, {}))
    looks["v"] = draw(pieces.operand(dtype, shape["v"], append_paged_kv_.REGIMES))
    for name in CACHES:
        layout = draw(st.sampled_from(CACHE_LAYOUTS))
        looks[name] = Operand(dtype, layout, specials=draw(st.sampled_from(((), HELD))))
    return _spec(dims, looks, dtype, bool(turned.param["is_neox"]), turned.seed)


def row(dtype: str, choice: Mapping[str, Any]) -> Spec:
    """A row of the covering array."""
    dims = DIMS[choice["dims"]] | PAGES[choice["dims"]] | {"max_position": _rope.MAX_POSITION}
    if choice["layout"] == "int64_stride":
        dims["tokens"] = 1
    skipped = {"none": 0, "some": dims["tokens"] // 3, "all": dims["tokens"]}
    dims["skipped"] = skipped[choice["skipped"]]
    others = ("contig", "row_stride", "step2", "misalign", "transposed")
    indices = ("contig", "step2", "misalign")
    looks = {
        "q": Operand(dtype, choice["layout"], choice["regime"]),
        "k": Operand(dtype, pieces.pick(choice, "k", others)),
        "v": Operand(dtype, pieces.pick(choice, "v", (*others, "unbind"))),
        "cos_sin_cache": Operand("float32", pieces.pick(choice, "angles", others), "unit_circle"),
        "positions": Operand(
            choice["width"], pieces.pick(choice, "positions", indices), choice["positions"],
            _rope.MAX_POSITION,
        ),
        "k_cache": Operand(dtype, choice["cache"], specials=choice["held"]),
        "v_cache": Operand(dtype, pieces.pick(choice, "v_cache", CACHE_LAYOUTS)),
        "slot_mapping": Operand("int64", pieces.pick(choice, "slots", indices), "first", 1),
    }  # fmt: skip
    return _spec(dims, looks, dtype, choice["is_neox"], seed=1)


def zero(dtype: str) -> list[Spec]:
    """No rows, no pages and so no slots, no heads of either kind, no elements in a head."""
    base = DIMS["full"] | PAGES["full"] | {"max_position": 17}
    changes = (
        {"tokens": 0}, {"pages": 0}, {"heads": 0}, {"kv_heads": 0},
        {"head_dim": 0, "rotary_dim": 0}, {"head_dim": 0, "rotary_dim": 0, "value_dim": 8},
    )  # fmt: skip
    return [
        _spec(base | change, {"q": Operand(dtype, layout)}, dtype, is_neox)
        for change in changes
        for is_neox, layout in ((True, "contig"), (False, "row_stride"))
    ]


def classes(dtype: str) -> list[Spec]:
    """NaN and infinities in what is rotated, copied or kept; 16 elements a head, 8 rotated."""
    dims = {"tokens": 3, "heads": 2, "kv_heads": 1, "head_dim": 16, "rotary_dim": 8}
    dims |= {"max_position": 17, "pages": 2, "page_size": 3, "skipped": 1}
    return [
        _spec(dims, {name: Operand(dtype, specials=special)}, dtype, is_neox)
        for name in ("q", "k", "v", "k_cache")
        for special in (((17, "nan"),), ((2, "inf"), (19, "-0")), ((30, "-inf"), (31, "nan")))
        for is_neox in (True, False)
    ]


def named(dtype: str) -> dict[str, Spec]:
    """Heads of models as ``model, tokens in pages``."""
    found = {}
    for model, tokens, pages in NAMED:
        heads, kv_heads, head_dim, rotary_dim, is_neox = _rope.MODELS[model]
        dims = {
            "tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
            "rotary_dim": rotary_dim, "max_position": 8192 if tokens > 8 else 512,
            "pages": pages, "page_size": 16,
        }  # fmt: skip
        found[f"{model}, {tokens} in {pages}"] = _spec(dims, {}, dtype, is_neox)
    return found


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """Exact rotation within its bound; in the caches all but rotated keys is exact."""
    q, k = _rope.oracle(args, contract)
    k_cache, v_cache = append_paged_kv_.oracle({**args, "k": k.value}, contract)
    bound = torch.zeros_like(k_cache.value)
    page, offset, rows = slots_of(args["slot_mapping"], bound.shape[1])
    assert k.bound is not None
    bound[page, offset] = k.bound[rows]
    return q, replace(k_cache, bound=bound), v_cache


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
    fill=append_paged_kv_.fill,
    mutates=MUTATES,
    cost=8,
)
