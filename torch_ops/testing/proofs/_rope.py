"""Proof of rotary embeddings: shared by the functional and the mutating op.

A pair (a, b) becomes ``(a cos - b sin, b cos + a sin)``, with cosines and sines read from the
cache at the token's position; elements past rotary_dim are copied bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing import draw as pieces
from torch_ops.testing._hypothesis import DrawFn, SearchStrategy
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.arithmetic import contract_field, rounding
from torch_ops.testing.layouts import LAYOUTS
from torch_ops.testing.proof import Arguments, Output, Proof, Shapes
from torch_ops.testing.proofs._rope_faults import generic, mutants
from torch_ops.testing.proofs._rope_laws import LAWS, joined, pairs_of
from torch_ops.testing.spec import Operand, Spec
from torch_ops.testing.values import FINITE_SPECIALS

REGIMES = (
    "normal", "zeros", "ones", "arange17", "grid", "sparse", "rows", "constant", "one_hot",
    "equal_rows", "alternating", "wide", "spiky", "sorted", "ties", "small", "huge",
)  # fmt: skip
POSITIONS = ("index", "first", "last", "counting", "backwards")
DIMS: dict[str, dict[str, int]] = {
    "one": {"tokens": 1, "heads": 1, "kv_heads": 1, "head_dim": 2, "rotary_dim": 2},
    "odd": {"tokens": 7, "heads": 3, "kv_heads": 1, "head_dim": 80, "rotary_dim": 80},
    "full": {"tokens": 8, "heads": 4, "kv_heads": 2, "head_dim": 64, "rotary_dim": 64},
    "partial": {"tokens": 5, "heads": 2, "kv_heads": 2, "head_dim": 128, "rotary_dim": 32},
    "narrow": {"tokens": 33, "heads": 2, "kv_heads": 5, "head_dim": 10, "rotary_dim": 6},
    "none": {"tokens": 4, "heads": 2, "kv_heads": 1, "head_dim": 16, "rotary_dim": 0},
}
# heads, kv_heads, head_dim, rotary_dim, is_neox
MODELS: dict[str, tuple[int, int, int, int, bool]] = {
    "llama3-8b": (32, 8, 128, 128, True),
    "smollm2-135m": (9, 3, 64, 64, True),
    "gemma2-2b": (8, 4, 256, 256, True),
    "phi2": (32, 32, 80, 32, True),
    "gpt-j-6b": (16, 16, 256, 64, False),
    "glm4-9b": (32, 2, 128, 64, False),
}
NAMED = (
    ("llama3-8b", 1), ("llama3-8b", 8), ("llama3-8b", 512), ("llama3-8b", 4096),
    ("llama3-8b", 16384), ("smollm2-135m", 7), ("gemma2-2b", 8), ("phi2", 8), ("gpt-j-6b", 8),
    ("glm4-9b", 8), ("glm4-9b", 4096),
)  # fmt: skip
AXES: dict[str, Sequence[Any]] = {
    "layout": LAYOUTS,
    "regime": ("normal", "rows", "zeros", "grid", "wide", "huge", "spiky"),
    "dims": tuple(DIMS),
    "positions": POSITIONS,
    "width": ("int64", "int32"),
    "is_neox": (True, False),
}
MAX_POSITION = 300


def shapes(spec: Spec) -> Shapes:
    """Shapes of queries, keys, cache and positions."""
    d = spec.dim
    return {
        "q": (d["tokens"], d["heads"], d["head_dim"]),
        "k": (d["tokens"], d["kv_heads"], d["head_dim"]),
        "cos_sin_cache": (d["max_position"], d["rotary_dim"]),
        "positions": (d["tokens"],),
    }


def strategy(op: str, mutates: Sequence[str]) -> Callable[[str, int], SearchStrategy[Spec]]:
    """Strategy of Specs."""

    @st.composite
    def specs(draw: DrawFn, dtype: str, budget: int) -> Spec:
        head_dim = draw(st.sampled_from((64, 2, 8, 10, 16, 32, 40, 72, 80, 96, 128, 192, 256)))
        partial = draw(
            st.one_of(st.just(head_dim), st.integers(0, head_dim // 2).map(lambda i: 2 * i))
        )
        kv_heads = draw(st.sampled_from((1, 2, 3)))
        heads = kv_heads * draw(st.sampled_from((1, 2, 3, 4, 7)))
        dims = {
            "tokens": draw(pieces.tokens(budget // (heads * head_dim))),
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "rotary_dim": partial,
            "max_position": draw(st.sampled_from((MAX_POSITION, 1, 2, 17, 1024))),
        }
        shape = shapes(Spec.of(op, dims, {}))
        operands = {
            name: draw(
                pieces.operand(
                    dtype, shape[name], REGIMES, names=FINITE_SPECIALS,
                    mutated=name in mutates,
                )
            )
            for name in ("q", "k")
        }  # fmt: skip
        cache = pieces.operand("float32", shape["cos_sin_cache"], ("unit_circle", "grid"))
        operands["cos_sin_cache"] = draw(cache)
        width = draw(st.sampled_from(("int64", "int32")))
        high = dims["max_position"]
        operands["positions"] = draw(pieces.operand(width, (dims["tokens"],), POSITIONS, high=high))
        return Spec.of(op, dims, operands, {"is_neox": draw(st.booleans())}, draw(pieces.seeds()))

    return specs


def row(op: str, mutates: Sequence[str]) -> Callable[[str, Mapping[str, Any]], Spec]:
    """Maker of Specs from rows of the covering array."""

    def spec_of(dtype: str, choice: Mapping[str, Any]) -> Spec:
        dims = DIMS[choice["dims"]] | {"max_position": MAX_POSITION}
        if choice["layout"] == "int64_stride":
            dims["tokens"] = 1
        others = ("contig", "row_stride", "step2", "misalign", "transposed")
        operands = {
            "q": Operand(dtype, choice["layout"], choice["regime"]),
            "k": Operand(dtype, pieces.pick(choice, "k", others), "normal"),
            "cos_sin_cache": Operand(
                "float32", pieces.pick(choice, "cache", others), "unit_circle"
            ),
            "positions": Operand(
                choice["width"], pieces.pick(choice, "positions", ("contig", "step2", "misalign")),
                choice["positions"], MAX_POSITION,
            ),
        }  # fmt: skip
        spec = Spec.of(op, dims, operands, {"is_neox": choice["is_neox"]}, seed=1)
        return pieces.fitted(spec, shapes(spec), mutates)

    return spec_of


def _operands(dtype: str) -> dict[str, Operand]:
    return {
        "q": Operand(dtype),
        "k": Operand(dtype),
        "cos_sin_cache": Operand("float32", regime="unit_circle"),
        "positions": Operand("int64", regime="index", high=17),
    }


def zero(op: str) -> Callable[[str], list[Spec]]:
    """Specs without tokens, without heads, and without elements in a head."""
    base = DIMS["full"] | {"max_position": 17}
    changes = ({"tokens": 0}, {"kv_heads": 0}, {"head_dim": 0, "rotary_dim": 0})

    def specs(dtype: str) -> list[Spec]:
        return [
            Spec.of(op, base | change, operands, {"is_neox": neox})
            for change in changes
            for neox in (True, False)
            for operands in (
                _operands(dtype),
                _operands(dtype) | {"q": Operand(dtype, "row_stride")},
            )
        ]

    return specs


def named(op: str) -> Callable[[str], dict[str, Spec]]:
    """Queries and keys of models as ``model, tokens``, int64 or int32 positions."""

    def specs(dtype: str) -> dict[str, Spec]:
        found = {}
        for model, tokens in NAMED:
            heads, kv_heads, head_dim, rotary_dim, is_neox = MODELS[model]
            longest = 8192 if tokens > 8 else 512
            dims = {
                "tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
                "rotary_dim": rotary_dim, "max_position": longest,
            }  # fmt: skip
            for width in ("int64", "int32") if tokens == 8 else ("int64",):
                positions = Operand(width, regime="index", high=longest)
                operands = _operands(dtype) | {"positions": positions}
                name = f"{model}, {tokens}" + (", int32" if width == "int32" else "")
                found[name] = Spec.of(op, dims, operands, {"is_neox": is_neox})
        return found

    return specs


def classes(op: str) -> Callable[[str], list[Spec]]:
    """NaN and infinities in rotated and copied elements; 16 elements a head, 8 of them rotated."""
    dims = {"tokens": 3, "heads": 2, "kv_heads": 1, "head_dim": 16, "rotary_dim": 8}

    def specs(dtype: str) -> list[Spec]:
        return [
            Spec.of(
                op, dims | {"max_position": 17},
                _operands(dtype) | {name: Operand(dtype, specials=special)}, {"is_neox": neox},
            )
            for name in ("q", "k")
            for special in (((17, "nan"),), ((18, "inf"),), ((30, "-inf"), (31, "nan")))
            for neox in (True, False)
        ]  # fmt: skip

    return specs


def _rotated(name: str, x: Tensor, args: Arguments) -> Output:
    unit = rounding(x.dtype)
    cache, is_neox = args["cos_sin_cache"].double(), args["is_neox"]
    cos, sin = cache[args["positions"].long()].unsqueeze(1).chunk(2, -1)
    exact = x.double()
    width = cache.shape[-1]
    a, b = pairs_of(exact, width, is_neox)
    tail = exact[..., width:]
    value = joined(a * cos - b * sin, b * cos + a * sin, tail, is_neox)
    terms = ((a * cos).abs() + (b * sin).abs(), (b * cos).abs() + (a * sin).abs())
    bounds = [
        3 * unit.acc * term + unit.u * y.abs() + unit.eta + unit.tiny * unit.acc
        for term, y in zip(terms, pairs_of(value, width, is_neox), strict=True)
    ]
    return Output(
        name, value, joined(bounds[0], bounds[1], torch.zeros_like(tail), is_neox), x.dtype
    )


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """Exact rotation with the very cache that the kernel reads, and its bound.

    Two products and a sum in the compute dtype: ``3 a (|a cos| + |b sin|)``, then one rounding
    ``|y| u + eta``. Copied elements have a bound of zero.
    """
    contract_field(contract, "arithmetic", "fp32")
    contract_field(contract, "pairing", "half_of_rotary_dim")
    contract_field(contract, "cache_dtype", "float32")
    return _rotated("q", args["q"], args), _rotated("k", args["k"], args)


def rope_proof(op: str, mutates: tuple[str, ...]) -> Proof:
    """The proof, for the op that returns its outputs or the one that writes its inputs."""
    return Proof(
        op=op,
        arguments=("q", "k", "cos_sin_cache", "positions", "is_neox"),
        shapes=shapes,
        draw=strategy(op, mutates),
        axes=AXES,
        row=row(op, mutates),
        zero=zero(op),
        classes=classes(op),
        named=named(op),
        oracle=oracle,
        laws=LAWS,
        mutants=(*mutants(), *generic(in_place=bool(mutates))),
        mutates=mutates,
    )
