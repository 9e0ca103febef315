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

from torch_ops.testing.arithmetic import contract_field
from torch_ops.testing.proof import Arguments, Output, Shapes
from torch_ops.testing.proofs._attention import attend
from torch_ops.testing.spec import Operand, Spec

NUMBERS = ("is_causal", "scale", "window_left", "logits_soft_cap")
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
        queries: Names of the arguments that hold queries.
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
    queries: tuple[str, ...] = ("q",)

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
        q = args[self.queries[0]]
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
        places = keys.shape[: 2 if "kv_indices" in args else 1]
        found = torch.ones(places, dtype=torch.bool, device=keys.device)
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


HEADS = {"kv_heads": 2, "group": 2, "head_dim": 16}
PACKED_DIMS: dict[str, Dims] = {
    "one": sized([1], [1], kv_heads=1, group=1, head_dim=8, pad=0),
    "decode": sized([1, 1, 1, 1], [65, 17, 1, 33], kv_heads=2, group=4, head_dim=64, pad=1),
    "ragged": sized([3, 0, 7, 1, 5], [5, 4, 2, 0, 9], **HEADS, pad=2),
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


def spec_of(
    op: str, form: Form, dims: Dims, looks: Mapping[str, Operand], params: Mapping[str, Any],
    seed: int = 0, slack: int = 0,
) -> Spec:  # fmt: skip
    """A Spec whose largest lengths are right, or too large by some slack."""
    dtype = looks[form.queries[0]].dtype
    tables = {n: Operand("int32", regime="first", high=1) for n in form.tables}
    plain = {n: Operand(dtype) for n in (*form.queries, form.keys, form.values)}
    numbers = {"is_causal": False, "scale": None, "window_left": -1, "logits_soft_cap": 0.0}
    spec = Spec.of(op, dims, {**plain, **tables, **looks}, {}, seed)
    most = {f"max_{what}_len": max(lengths(spec, what), default=0) + slack for what in ("qo", "kv")}
    known = {**most, **numbers, **params}
    return spec.replace(params={n: known[n] for n in form.arguments if n in known})
