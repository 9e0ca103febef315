"""Proofs of attention over sequences of different lengths: Specs and the float64 oracle.

Sequence b has ``qo{b}`` queries and ``kv{b}`` keys, or ``qo`` and ``kv`` where a Spec has no size
of its own for it. A `Form` says where an op finds them: in packed rows, or in pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing import draw as pieces
from torch_ops.testing._hypothesis import DrawFn, SearchStrategy
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.arithmetic import contract_field
from torch_ops.testing.layouts import LAYOUTS
from torch_ops.testing.proof import Arguments, Output, Shapes
from torch_ops.testing.proofs._attention import CAPS, QK, SCALES, WINDOWS, V, attend
from torch_ops.testing.spec import Operand, Spec

# Where all products of a logit are alike, they round alike; the bound is that of a random walk.
KEYS = tuple(regime for regime in QK if regime not in ("ones", "constant", "equal_rows"))
NUMBERS = ("is_causal", "scale", "window_left", "logits_soft_cap")
TABLE_LAYOUTS = ("contig", "step2", "misalign")
Dims = dict[str, int]


def sized(queries: Sequence[int], keys: Sequence[int], **others: int) -> Dims:
    """Dims of a batch of sequences."""
    found = {"batch": len(keys)} | others
    found |= {f"qo{i}": n for i, n in enumerate(queries)}
    return found | {f"kv{i}": n for i, n in enumerate(keys)}


def lengths(spec: Spec, what: str) -> list[int]:
    """Sizes ``qo`` or ``kv`` of all sequences."""
    d = spec.dim
    return [d.get(f"{what}{i}", d.get(what, 0)) for i in range(d["batch"])]


def bounds(sizes: Sequence[int]) -> Tensor:
    """Where each sequence begins, and the last one ends."""
    return torch.tensor([0, *sizes]).cumsum(0)


@dataclass(frozen=True)
class Run:
    """Where one sequence is: rows of queries, and an index of its keys, in order."""

    rows: slice
    keys: tuple[Tensor, ...]


@dataclass(frozen=True)
class Form:
    """How an op is given its sequences.

    Attributes:
        arguments: Names of the op's arguments.
        keys: Name of the argument that holds keys.
        values: Name of the argument that holds values.
        runs: Where the sequences are.
        shapes: Shapes of the arguments.
        fill: Content of tables, and NaN where nothing may be read.
        dims: Dims of the covering array, by name.
        tables: Names of the int32 arguments.
        key_layouts: Layouts of keys and values.
    """

    arguments: tuple[str, ...]
    keys: str
    values: str
    runs: Callable[[Arguments], list[Run]]
    shapes: Callable[[Spec], Shapes]
    fill: Callable[[Spec, str, Tensor], Tensor]
    dims: Mapping[str, Dims]
    tables: tuple[str, ...]
    key_layouts: tuple[str, ...]

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the arguments that say how to attend."""
        return tuple(n for n in self.arguments if n in NUMBERS)

    def one(self, args: Arguments, run: Run) -> Arguments:
        """One sequence as arguments of dense attention, a batch of one."""
        found = {"q": args["q"][run.rows], "k": args[self.keys][run.keys]}
        found["v"] = args[self.values][run.keys]
        dense = {name: tensor.unsqueeze(0) for name, tensor in found.items()}
        return dense | {"is_causal": False} | {name: args[name] for name in self.numbers}

    def oracle(self, args: Arguments, contract: Any) -> tuple[Output, Output]:
        """Dense attention of each sequence; rows of no sequence are zeros and -inf, exactly."""
        contract_field(contract, "padding_row", "zero_and_minus_inf")
        contract_field(contract, "unread", "ignored")
        q = args["q"]
        out = torch.zeros((*q.shape[:2], args[self.values].shape[-1]), dtype=torch.float64)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
        errors = torch.zeros_like(out), torch.zeros_like(lse)
        for run in self.runs(args):
            if run.rows.start < run.rows.stop:
                parts = attend(self.one(args, run), contract)
                for value, error, part in zip((out, lse), errors, parts, strict=True):
                    assert part.bound is not None
                    value[run.rows], error[run.rows] = part.value[0], part.bound[0]
        return Output("out", out, errors[0], q.dtype), Output("lse", lse, errors[1], torch.float32)

    def out_only(self, args: Arguments, contract: Any) -> tuple[Output, ...]:
        """The oracle of an op that returns no LSE."""
        return self.oracle(args, contract)[:1]

    def unread(self, args: Arguments) -> Tensor:
        """Which rows or slots of the keys no sequence reads."""
        keys = args[self.keys]
        found = torch.ones(keys.shape[:-2], dtype=torch.bool, device=keys.device)
        for run in self.runs(args):
            found[run.keys] = False
        return found


def packed_runs(args: Arguments) -> list[Run]:
    """Sequences in packed rows."""
    device = args["k"].device
    return [
        Run(slice(a, b), (torch.arange(c, d, device=device),))
        for (a, b), (c, d) in zip(_pairs(args["qo_indptr"]), _pairs(args["kv_indptr"]), strict=True)
    ]


def _pairs(indptr: Tensor) -> Iterator[tuple[int, int]]:
    numbers = indptr.tolist()
    return itertools.pairwise(numbers)


def _packed_shapes(spec: Spec) -> Shapes:
    d = spec.dim
    queries, keys = (sum(lengths(spec, what)) + d.get("pad", 0) for what in ("qo", "kv"))
    return {
        "q": (queries, d["kv_heads"] * d["group"], d["head_dim"]),
        "k": (keys, d["kv_heads"], d["head_dim"]),
        "v": (keys, d["kv_heads"], d.get("value_dim", d["head_dim"])),
        "qo_indptr": (d["batch"] + 1,),
        "kv_indptr": (d["batch"] + 1,),
    }


def _packed_fill(spec: Spec, name: str, values: Tensor) -> Tensor:
    what = "kv" if name in ("k", "v", "kv_indptr") else "qo"
    if name.endswith("indptr"):
        return bounds(lengths(spec, what)).to(values.dtype)
    values[sum(lengths(spec, what)) :] = torch.nan
    return values


_HEADS = {"kv_heads": 2, "group": 2, "head_dim": 16}
PACKED_DIMS: dict[str, Dims] = {
    "one": sized([1], [1], kv_heads=1, group=1, head_dim=8, pad=0),
    "decode": sized([1, 1, 1, 1], [65, 17, 1, 33], kv_heads=2, group=4, head_dim=64, pad=1),
    "ragged": sized([3, 0, 7, 1, 5], [5, 4, 2, 0, 9], **_HEADS, pad=2),
    "square": sized([33, 5, 12], [33, 5, 12], kv_heads=2, group=1, head_dim=32, pad=0),
    "ends": sized([0, 6, 0], [0, 9, 3], kv_heads=2, group=3, head_dim=24, pad=3),
    "prefix": sized([7, 2], [130, 40], kv_heads=1, group=3, head_dim=80, pad=1),
    "tile": sized([64, 17], [128, 20], kv_heads=1, group=2, head_dim=128, pad=0),
}
PACKED = Form(
    arguments=("q", "k", "v", "qo_indptr", "kv_indptr", "max_qo_len", "max_kv_len", *NUMBERS),
    keys="k",
    values="v",
    runs=packed_runs,
    shapes=_packed_shapes,
    fill=_packed_fill,
    dims=PACKED_DIMS,
    tables=("qo_indptr", "kv_indptr"),
    key_layouts=("contig", "row_stride", "transposed", "unbind", "misalign"),
)


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


def spec_of(
    op: str, form: Form, dims: Dims, looks: Mapping[str, Operand], params: Mapping[str, Any],
    seed: int = 0, slack: int = 0,
) -> Spec:  # fmt: skip
    """A Spec whose largest lengths are right, or too large by some slack."""
    dtype = looks["q"].dtype
    tables = {n: Operand("int32", regime="first", high=1) for n in form.tables}
    plain = {n: Operand(dtype) for n in ("q", form.keys, form.values)}
    numbers = {"is_causal": False, "scale": None, "window_left": -1, "logits_soft_cap": 0.0}
    spec = Spec.of(op, dims, {**plain, **tables, **looks}, {}, seed)
    most = {f"max_{what}_len": max(lengths(spec, what), default=0) + slack for what in ("qo", "kv")}
    known = {**most, **numbers, **params}
    return spec.replace(params={n: known[n] for n in form.arguments if n in known})


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
    batches = {"batch": 0, "qo": 2, "kv": 3, **_HEADS, "pad": 0}
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
