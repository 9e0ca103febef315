"""Proof of dense attention: Specs, the float64 oracle and its bound.

q ``[B, S, H, D]``, k ``[B, N, K, D]``, v ``[B, N, K, Dv]``. Query i stands at key i + N - S; a
query with nothing to attend gives zeros and an LSE of -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops.testing import draw as pieces
from torch_ops.testing._hypothesis import DrawFn, SearchStrategy
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.arithmetic import contract_field, rounding
from torch_ops.testing.layouts import LAYOUTS
from torch_ops.testing.proof import Arguments, Output, Shapes
from torch_ops.testing.spec import Operand, Spec

ARGUMENTS = ("q", "k", "v", "is_causal", "scale", "window_left", "logits_soft_cap")
QK = (
    "normal", "small", "zeros", "ones", "grid", "sparse", "one_hot", "equal_rows", "alternating",
    "ties", "sorted", "constant",
)  # fmt: skip
V = ("normal", "rows", "grid", "constant", "ones", "sparse", "tiny", "spiky", "mean_shift", "huge")
DIMS: dict[str, dict[str, int]] = {
    "one": {"batch": 1, "queries": 1, "keys": 1, "kv_heads": 1, "group": 1, "head_dim": 8},
    "decode": {"batch": 3, "queries": 1, "keys": 65, "kv_heads": 2, "group": 4, "head_dim": 64},
    "square": {"batch": 2, "queries": 33, "keys": 33, "kv_heads": 2, "group": 1, "head_dim": 32},
    "prefix": {"batch": 1, "queries": 7, "keys": 130, "kv_heads": 1, "group": 3, "head_dim": 80},
    "long_query": {"batch": 2, "queries": 9, "keys": 4, "kv_heads": 2, "group": 2, "head_dim": 16},
    "grouped": {"batch": 2, "queries": 3, "keys": 17, "kv_heads": 2, "group": 5, "head_dim": 24},
    "tile": {"batch": 1, "queries": 64, "keys": 128, "kv_heads": 1, "group": 2, "head_dim": 128},
}
# kv_heads, group, head_dim, parameters
MODELS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "llama3-8b": (8, 4, 128, {"is_causal": True}),
    "smollm2-135m": (3, 3, 64, {"is_causal": True}),
    "mistral-7b": (8, 4, 128, {"is_causal": True, "window_left": 4095}),
    "gemma2-2b": (4, 2, 256, {"is_causal": True, "logits_soft_cap": 50.0}),
    "bert-base": (12, 1, 64, {}),
}
# model, batch, queries, keys
NAMED = (
    ("llama3-8b", 1, 1024, 1024), ("llama3-8b", 1, 4096, 4096), ("llama3-8b", 1, 16384, 16384),
    ("llama3-8b", 1, 16, 16), ("llama3-8b", 1, 16, 48), ("llama3-8b", 2, 1, 64),
    ("llama3-8b", 1, 1, 128), ("llama3-8b", 16, 1, 4096), ("llama3-8b", 4, 512, 2048),
    ("smollm2-135m", 1, 33, 33), ("mistral-7b", 1, 16, 16), ("mistral-7b", 1, 16384, 16384),
    ("gemma2-2b", 1, 16, 33), ("gemma2-2b", 1, 4096, 4096), ("bert-base", 2, 33, 33),
    ("bert-base", 32, 512, 512),
)  # fmt: skip
WINDOWS = (-1, 0, 1, 3, 64)
CAPS = (0.0, 1.0, 30.0)
SCALES = (None, 0.25)
AXES: dict[str, Sequence[Any]] = {
    "layout": LAYOUTS,
    "dims": tuple(DIMS),
    "regime": ("normal", "grid", "zeros", "one_hot", "equal_rows", "alternating"),
    "values": ("normal", "rows", "constant", "spiky"),
    "is_causal": (False, True),
    "window": WINDOWS,
    "cap": CAPS,
    "scale": SCALES,
}


def shapes(spec: Spec) -> Shapes:
    """Shapes of queries, keys and values; values may be as wide as they like."""
    d = spec.dim
    keys = (d["batch"], d["keys"], d["kv_heads"])
    return {
        "q": (d["batch"], d["queries"], d["kv_heads"] * d["group"], d["head_dim"]),
        "k": (*keys, d["head_dim"]),
        "v": (*keys, d.get("value_dim", d["head_dim"])),
    }


def strategy(op: str) -> Callable[[str, int], SearchStrategy[Spec]]:
    """Strategy of Specs."""

    @st.composite
    def specs(draw: DrawFn, dtype: str, budget: int) -> Spec:
        sizes = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 64, 65, 127, 128, 129)
        head_dim = draw(st.sampled_from((64, 128, 32, 16, 80, 96, 72, 192, 40, 8, 1)))
        kv_heads, batch = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 2, 3)))
        group = draw(st.sampled_from((1, 2, 4, 3, 5, 6, 7, 8)))
        limit = max(budget // (batch * kv_heads * head_dim), 1)
        keys = draw(pieces.size(min(limit, 257), sizes))
        queries = draw(pieces.size(min(max(limit // group, 1), 129, 2**14 // keys + 1), sizes))
        dims = {
            "batch": batch, "queries": queries, "keys": keys, "kv_heads": kv_heads,
            "group": group, "head_dim": head_dim,
        }  # fmt: skip
        if draw(st.integers(0, 3)) == 3:
            dims["value_dim"] = draw(st.sampled_from((16, 1, 24, 128)))
        shape = shapes(Spec.of(op, dims, {}))
        operands = {
            name: draw(pieces.operand(dtype, shape[name], V if name == "v" else QK))
            for name in ("q", "k", "v")
        }
        params = {
            "is_causal": draw(st.booleans()),
            "scale": draw(st.sampled_from(SCALES)),
            "window_left": draw(st.sampled_from((-1, -1, 0, 1, 3, 64))),
            "logits_soft_cap": draw(st.sampled_from(CAPS)),
        }
        return Spec.of(op, dims, operands, params, draw(pieces.seeds()))

    return specs


def row(op: str) -> Callable[[str, Mapping[str, Any]], Spec]:
    """Maker of Specs from rows of the covering array."""

    def spec_of(dtype: str, choice: Mapping[str, Any]) -> Spec:
        dims = dict(DIMS[choice["dims"]])
        if choice["layout"] == "int64_stride":
            dims["batch"] = 1
        others = ("contig", "row_stride", "transposed", "unbind", "misalign")
        operands = {
            "q": Operand(dtype, choice["layout"], choice["regime"]),
            "k": Operand(dtype, pieces.pick(choice, "k", others), "normal"),
            "v": Operand(dtype, pieces.pick(choice, "v", others), choice["values"]),
        }
        params = {
            "is_causal": choice["is_causal"],
            "scale": choice["scale"],
            "window_left": choice["window"],
            "logits_soft_cap": choice["cap"],
        }
        spec = Spec.of(op, dims, operands, params, seed=1)
        return pieces.fitted(spec, shapes(spec))

    return spec_of


def _spec(op: str, dtype: str, dims: Mapping[str, int], **params: Any) -> Spec:
    operands = {n: Operand(dtype) for n in ("q", "k", "v")}
    rest = {"is_causal": False, "scale": None, "window_left": -1, "logits_soft_cap": 0.0}
    return Spec.of(op, dims, operands, rest | params)


def zero(op: str) -> Callable[[str], list[Spec]]:
    """No batch, no queries, no keys (every row is empty), no heads."""
    base = DIMS["square"] | {"queries": 5}

    def specs(dtype: str) -> list[Spec]:
        return [
            _spec(op, dtype, base | {name: 0}, is_causal=causal)
            for name in ("batch", "queries", "keys", "kv_heads")
            for causal in (False, True)
        ]

    return specs


def named(op: str) -> Callable[[str], dict[str, Spec]]:
    """Attention of models, as ``batch, queries x keys``."""

    def specs(dtype: str) -> dict[str, Spec]:
        found = {}
        for model, batch, queries, keys in NAMED:
            kv_heads, group, head_dim, params = MODELS[model]
            dims = {
                "batch": batch, "queries": queries, "keys": keys, "kv_heads": kv_heads,
                "group": group, "head_dim": head_dim,
            }  # fmt: skip
            found[f"{model}, {batch}, {queries}x{keys}"] = _spec(op, dtype, dims, **params)
        return found

    return specs


def classes(op: str) -> Callable[[str], list[Spec]]:
    """NaN in a query spreads over its row and no further; NaN in a value over its column."""
    dims = {"batch": 1, "queries": 3, "keys": 4, "kv_heads": 1, "group": 2, "head_dim": 8}

    def specs(dtype: str) -> list[Spec]:
        found = []
        for name, place in (("q", 20), ("v", 13)):
            for special in ("nan", "inf"):
                if (name, special) == ("q", "inf"):
                    continue  # inf - inf in the softmax: NaN or not depends on the order of terms
                spec = _spec(op, dtype, dims)
                operands = spec.operand | {name: Operand(dtype, specials=((place, special),))}
                found.append(spec.replace(operands=operands))
        return found

    return specs


def visible(queries: int, keys: int, is_causal: bool, window_left: int) -> Tensor:
    """Which key each query attends to: ``[S, N]``."""
    place = torch.arange(queries).unsqueeze(1) + keys - queries
    key = torch.arange(keys).unsqueeze(0)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if is_causal:
        seen &= key <= place
    if window_left >= 0:
        seen &= place - key <= window_left
    return seen


def by_head(x: Tensor, group: int) -> Tensor:
    """``[B, N, K, D]`` to ``[B, H, N, D]``, each key head once per query head that reads it."""
    return x.transpose(1, 2).repeat_interleave(group, dim=1)


def logits(args: Arguments) -> tuple[Tensor, Tensor]:
    """Exact logits after the soft cap ``[B, H, S, N]``, and the sum of their terms' magnitudes."""
    q = args["q"].double().transpose(1, 2)
    group = q.shape[1] // max(args["k"].shape[2], 1)
    k = by_head(args["k"].double(), group)
    scale = q.shape[-1] ** -0.5 if args["scale"] is None else args["scale"]
    s = scale * (q @ k.transpose(-1, -2))
    size = abs(scale) * (q.abs() @ k.abs().transpose(-1, -2))
    cap = args["logits_soft_cap"]
    return (cap * torch.tanh(s / cap) if cap > 0 else s), size


class Probabilities(NamedTuple):
    """The exact softmax of logits, and what it is made of.

    Attributes:
        p: ``[B, H, S, N]``, zeros where a query doesn't attend.
        lse: ``[B, H, S]``.
        error: Of a logit, for each query: ``[B, H, S]``; see `attend`.
        seen: ``[S, N]``.
    """

    p: Tensor
    lse: Tensor
    error: Tensor
    seen: Tensor


def probabilities(args: Arguments) -> Probabilities:
    """Exact probabilities."""
    unit = rounding(args["q"].dtype)
    s, size = logits(args)
    seen = visible(s.shape[-2], s.shape[-1], args["is_causal"], args["window_left"])
    masked = s.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(masked, -1)
    p = torch.exp(masked - lse.unsqueeze(-1)).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    sizes = size.masked_fill(~seen, 0.0)
    largest = sizes.amax(-1) if sizes.shape[-1] else sizes.sum(-1)
    head_dim, cap = args["q"].shape[-1], args["logits_soft_cap"]
    return Probabilities(p, lse, unit.acc * ((head_dim**0.5 + 2) * largest + 4 * cap), seen)


def attend(args: Arguments, contract: Any) -> tuple[Output, Output]:
    """Exact output and LSE with their bounds.

    A logit is a sum of D products, scaled: it errs by ``e = a (sqrt(D) + 2) G``, G the largest
    ``scale sum|q k|`` over the keys a query attends to; the soft cap adds ``4 a cap``. Numerator
    and denominator of a softmax each carry exp of that, so probabilities err relatively by
    ``expm1(2 e)``; exp, sum over N keys and division add ``(8 + 2 sqrt(N)) a``; where P is stored
    in the input dtype its rounding adds u and, below the smallest normal number, an absolute eta.
    With ``A = sum p |v|``:

    * ``|o| u + A (expm1(2 e) + u_P + (8 + 2 sqrt(N)) a) + eta_P sum|v| + eta``
    * ``|lse|``: ``e + a (|lse| + 4 + sqrt(N))``, and its rounding to float32.
    """
    _known(contract)
    unit = rounding(args["q"].dtype)
    p, lse, e, seen = probabilities(args)
    empty, keys = ~seen.any(-1), p.shape[-1]
    v = by_head(args["v"].double(), p.shape[1] // max(args["v"].shape[2], 1))
    out, weight = p @ v, p @ v.abs()
    low = contract_field(contract, "p_dtype", "float32", "input") == "input"
    relative = torch.expm1(2 * e) + (8 + 2 * keys**0.5) * unit.acc + (unit.u if low else 0.0)
    under = (unit.eta if low else unit.tiny * unit.acc) * _by_head_sum(v, seen)
    bound = out.abs() * unit.u + weight * relative.unsqueeze(-1) + under + unit.eta
    u32 = torch.finfo(torch.float32).eps / 2
    size_of_lse = lse.abs().masked_fill(empty, 0.0)
    lse_bound = e + unit.acc * (size_of_lse + 4 + keys**0.5) + u32 * size_of_lse
    return (
        Output("out", out.transpose(1, 2), bound.transpose(1, 2), args["q"].dtype),
        Output("lse", lse.transpose(1, 2), lse_bound.transpose(1, 2), torch.float32),
    )


def _by_head_sum(v: Tensor, seen: Tensor) -> Tensor:
    return seen.double() @ v.abs().nan_to_num(0.0, 0.0, 0.0)


def _known(contract: Any) -> None:
    known = {
        "causal": "bottom_right", "empty_row": "zero_and_minus_inf", "lse_base": "e",
        "window": "keys_before_query", "soft_cap": "before_mask",
    }  # fmt: skip
    for field, value in known.items():
        contract_field(contract, field, value)


def out_only(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """The oracle of an op that returns no LSE."""
    return attend(args, contract)[:1]


def with_lse(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """The oracle of an op that returns the LSE too."""
    return attend(args, contract)
