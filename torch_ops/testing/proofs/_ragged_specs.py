"""Specs of attention over sequences of different lengths: rows, draws, edges and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_ops.testing import draw as pieces
from torch_ops.testing._hypothesis import DrawFn, SearchStrategy
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.layouts import LAYOUTS
from torch_ops.testing.proofs._attention import CAPS, QK, SCALES, WINDOWS, V
from torch_ops.testing.proofs._ragged import HEADS, Dims, Form, sized, spec_of
from torch_ops.testing.spec import Operand, Spec

# Where all products of a logit are alike, they round alike; the bound is that of a random walk.
KEYS = tuple(regime for regime in QK if regime not in ("ones", "constant", "equal_rows"))
TABLE_LAYOUTS = ("contig", "step2", "misalign")


def axes(form: Form) -> dict[str, Sequence[Any]]:
    """Axes of the covering array."""
    causal = {"is_causal": (False, True)} if "is_causal" in form.numbers else {}
    return {
        "layout": LAYOUTS,
        "dims": tuple(form.dims),
        "regime": ("normal", "grid", "zeros", "one_hot", "equal_rows", "alternating"),
        "values": ("normal", "rows", "constant", "spiky"),
        **causal,
        "window": WINDOWS,
        "cap": CAPS,
        "scale": SCALES,
    }


def row(op: str, form: Form) -> Callable[[str, Mapping[str, Any]], Spec]:
    """Maker of Specs from rows of the covering array."""

    def of(dtype: str, choice: Mapping[str, Any]) -> Spec:
        dims = dict(form.dims[choice["dims"]])
        if choice["layout"] == "int64_stride":
            dims |= {"kv_heads": 1, "group": 1}
        looks = {
            "q": Operand(dtype, choice["layout"], choice["regime"]),
            form.keys: Operand(dtype, pieces.pick(choice, "k", form.key_layouts), "normal"),
            form.values: Operand(
                dtype, pieces.pick(choice, "v", form.key_layouts), choice["values"]
            ),
        }
        for name in form.tables:
            look = pieces.pick(choice, name, TABLE_LAYOUTS)
            looks[name] = Operand("int32", look, "first", 1)
        params = {
            "is_causal": choice.get("is_causal", False), "scale": choice["scale"],
            "window_left": choice["window"], "logits_soft_cap": choice["cap"],
        }  # fmt: skip
        slack = pieces.pick(choice, "slack", (0, 0, 3))
        spec = spec_of(op, form, dims, looks, params, seed=1, slack=slack)
        return pieces.fitted(spec, form.shapes(spec))

    return of


def strategy(
    op: str, form: Form, extra: Callable[[DrawFn], Dims] = lambda draw: {}
) -> Callable[[str, int], SearchStrategy[Spec]]:
    """Strategy of Specs; `extra` draws the sizes that the form alone has."""

    @st.composite
    def specs(draw: DrawFn, dtype: str, budget: int) -> Spec:
        head_dim = draw(st.sampled_from((16, 64, 128, 32, 80, 96, 72, 40, 8, 1)))
        kv_heads, group = (
            draw(st.sampled_from((1, 2, 3))),
            draw(st.sampled_from((1, 2, 4, 3, 5, 7, 8))),
        )
        others = extra(draw)
        page = others.get("page_size", 16)
        sizes = sorted({0, 1, 2, 3, page - 1, page, page + 1, 2 * page, 33, 64, 65, 130})
        batch = draw(st.integers(1, 5))
        limit = max(budget // (batch * kv_heads * group * head_dim), 1)
        keys, queries = (
            [draw(st.sampled_from([n for n in sizes if n <= most])) for _ in range(batch)]
            for most in (min(limit, 130), min(limit, 65))
        )
        if "qo_indptr" not in form.tables:
            queries = []  # one each
        dims = sized(queries, keys, kv_heads=kv_heads, group=group, head_dim=head_dim)
        dims |= {"pad": draw(st.integers(0, 3))} | others
        if draw(st.integers(0, 3)) == 3:
            dims["value_dim"] = draw(st.sampled_from((16, 1, 24, 128)))
        shape = form.shapes(Spec.of(op, dims, {}))
        looks = {"q": draw(pieces.operand(dtype, shape["q"], QK))}
        for name, regimes in ((form.keys, KEYS), (form.values, V)):
            layout = draw(st.sampled_from(form.key_layouts))
            looks[name] = Operand(dtype, layout, draw(st.sampled_from(regimes)))
        for name in form.tables:
            looks[name] = Operand("int32", draw(st.sampled_from(TABLE_LAYOUTS)), "first", 1)
        params = {
            "is_causal": draw(st.booleans()),
            "scale": draw(st.sampled_from(SCALES)),
            "window_left": draw(st.sampled_from((-1, -1, 0, 1, 3, 64))),
            "logits_soft_cap": draw(st.sampled_from(CAPS)),
        }
        slack, seed = draw(st.sampled_from((0, 0, 1, 70))), draw(pieces.seeds())
        return pieces.fitted(spec_of(op, form, dims, looks, params, seed, slack), shape)

    return specs


def zero(op: str, form: Form) -> Callable[[str], list[Spec]]:
    """No sequences, no queries, no keys, no heads; also with rows that are nobody's."""
    base = dict(form.dims["ragged"])
    batches = {"batch": 0, "qo": 2, "kv": 3, **HEADS, "pad": 0}
    batches |= {n: base[n] for n in ("page_size", "spare") if n in base}
    keyless = base | {f"kv{i}": 0 for i in range(base["batch"])}
    changes = (
        batches,
        batches | {"pad": 2},
        base | {f"qo{i}": 0 for i in range(base["batch"])} | {"pad": 0},
        keyless,
        keyless | {"pad": 0, "spare": 0},
        base | {"kv_heads": 0},
    )

    def specs(dtype: str) -> list[Spec]:
        return [
            spec_of(op, form, dims, {"q": Operand(dtype)}, {"is_causal": causal})
            for dims in changes
            for causal in (False, True)[: 2 if "is_causal" in form.numbers else 1]
        ]

    return specs


def classes(op: str, form: Form, **others: int) -> Callable[[str], list[Spec]]:
    """NaN in a query spreads over its row and no further; NaN in a value over its column.

    Every slot of these is read, wherever a special value falls.
    """
    dims = sized([3, 1], [4, 2], kv_heads=1, group=2, head_dim=8, pad=0, **others)

    def specs(dtype: str) -> list[Spec]:
        found = []
        for name, special in (("q", "nan"), (form.values, "nan"), (form.values, "inf")):
            looks = {"q": Operand(dtype)} | {name: Operand(dtype, specials=((13, special),))}
            found.append(spec_of(op, form, dims, looks, {}))
        return found

    return specs


# kv_heads, group, head_dim, parameters
_MODELS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "llama3-8b": (8, 4, 128, {"is_causal": True}),
    "smollm2-135m": (3, 3, 64, {"is_causal": True}),
    "gemma2-2b": (4, 2, 256, {"is_causal": True, "logits_soft_cap": 50.0}),
    "mistral-7b": (8, 4, 128, {"is_causal": True, "window_left": 4095}),
}


def named(
    op: str, form: Form, calls: Sequence[tuple[str, int, int, int]], **others: int
) -> Callable[[str], dict[str, Spec]]:
    """Attention of models, as ``batch, queries x keys`` of each sequence."""

    def specs(dtype: str) -> dict[str, Spec]:
        found = {}
        for model, batch, queries, keys in calls:
            kv_heads, group, head_dim, params = _MODELS[model]
            dims = {
                "batch": batch, "qo": queries, "kv": keys, "kv_heads": kv_heads, "group": group,
                "head_dim": head_dim, "pad": 0, **others,
            }  # fmt: skip
            name = f"{model}, {batch}, {queries}x{keys}"
            found[name] = spec_of(op, form, dims, {"q": Operand(dtype)}, params)
        return found

    return specs
