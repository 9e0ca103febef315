"""Proof of the gradients of attention: Specs, the float64 oracle and its bound.

With ``dp = grad v'``, ``x = dp - sum(p dp) + grad_lse`` and ``ds = p x``: ``dq = scale ds k``,
``dk = scale ds' q`` and ``dv = p' grad``, each added up over the query heads of a key head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.contracts import AttentionGradientContract
from torch_ops.testing import arguments
from torch_ops.testing import draw as pieces
from torch_ops.testing._hypothesis import DrawFn
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.arithmetic import contract_field, rounding
from torch_ops.testing.proof import Arguments, Output, Shapes
from torch_ops.testing.proofs import _attention
from torch_ops.testing.spec import Operand, Spec

OP = "attention_backward"
ARGUMENTS = (
    "q", "k", "v", "out", "lse", "grad", "grad_lse",
    "is_causal", "scale", "window_left", "logits_soft_cap",
)  # fmt: skip
GIVEN = ("q", "k", "v")
LARGEST = 2**21
GRADS = ("normal", "ones", "grid", "sparse", "small", "constant")
AXES: dict[str, Sequence[Any]] = {
    **_attention.AXES,
    "dims": ("one", "decode", "square", "long_query", "grouped"),
    "regime": ("normal", "grid", "one_hot", "alternating"),
    "values": ("normal", "constant", "spiky"),
    "grads": ("normal", "ones", "grid"),
    "grad_lse": (False, True),
}


def shapes(spec: Spec) -> Shapes:
    """Those of attention; the gradients of results have their shapes."""
    found = dict(_attention.shapes(spec))
    out = (*found["q"][:3], found["v"][3])
    return {**found, "out": out, "lse": out[:3], "grad": out, "grad_lse": out[:3]}


@st.composite
def draw(draw: DrawFn, dtype: str, budget: int) -> Spec:
    """Specs: those of attention with gradients, that of the LSE in half of them."""
    spec = draw(_attention.strategy(OP)(dtype, budget // 2))
    shape, operands = shapes(spec), dict(spec.operand)
    if operands["v"].regime in ("rows", "huge"):  # products of two such leave float16
        operands["v"] = draw(pieces.operand(dtype, shape["v"], ("normal", "grid")))
    operands |= _left(dtype)
    operands["grad"] = draw(pieces.operand(dtype, shape["grad"], GRADS))
    if draw(st.booleans()):
        operands["grad_lse"] = draw(pieces.operand("float32", shape["lse"], GRADS))
    return spec.replace(operands=operands)


def _left(dtype: str, layout: str = "contig") -> dict[str, Operand]:
    """What forward leaves; `fill` makes it of q, k and v."""
    return {"out": Operand(dtype, layout), "lse": Operand("float32", layout)}


def row(dtype: str, choice: Mapping[str, Any]) -> Spec:
    """A row of the covering array."""
    spec = _attention.row(OP)(dtype, choice)
    others = ("contig", "row_stride", "transposed", "step2", "misalign")
    operands = spec.operand | _left(dtype, pieces.pick(choice, "out", ("contig", "row_stride")))
    operands["grad"] = Operand(dtype, pieces.pick(choice, "grad", others), choice["grads"])
    if choice["grad_lse"]:
        operands["grad_lse"] = Operand("float32", pieces.pick(choice, "rows", others), "normal")
    spec = spec.replace(operands=operands)
    return pieces.fitted(spec, shapes(spec))


def _also(spec: Spec, dtype: str) -> Spec:
    return spec.replace(operands=spec.operand | _left(dtype) | {"grad": Operand(dtype)})


def zero(dtype: str) -> list[Spec]:
    """Those of attention, with and without a gradient of the LSE."""
    found = [_also(spec, dtype) for spec in _attention.zero(OP)(dtype)]
    rows = {"grad_lse": Operand("float32")}
    return [*found, *(spec.replace(operands=spec.operand | rows) for spec in found[::2])]


def named(dtype: str) -> dict[str, Spec]:
    """Those of attention, up to `LARGEST` logits: what forward leaves is computed exactly."""
    found = _attention.named(OP)(dtype)
    return {name: _also(s, dtype) for name, s in found.items() if _logits_of(s) <= LARGEST}


def _logits_of(spec: Spec) -> int:
    return math.prod(spec.dim[n] for n in ("batch", "kv_heads", "group", "queries", "keys"))


def classes(dtype: str) -> list[Spec]:
    """NaN in a query, a value or a gradient spreads as far as products and sums take it."""
    dims = {"batch": 1, "queries": 3, "keys": 4, "kv_heads": 1, "group": 2, "head_dim": 8}
    params = {"is_causal": False, "scale": None, "window_left": -1, "logits_soft_cap": 0.0}
    plain = Spec.of(OP, dims, {name: Operand(dtype) for name in GIVEN}, params)
    found = []
    for name, place in (("q", 20), ("v", 13), ("grad", 20)):
        spec = _also(plain, dtype)
        special = {name: Operand(dtype, specials=((place, "nan"),))}
        found.append(spec.replace(operands=spec.operand | special))
    return found


def left(args: Arguments) -> dict[str, Tensor]:
    """What forward leaves for these q, k and v: its exact results, rounded."""
    on_cpu = {n: a.cpu() if isinstance(a, Tensor) else a for n, a in args.items()}
    out, lse = _attention.attend(on_cpu, AttentionGradientContract())
    q = args["q"]
    return {"out": out.value.to(q.dtype).to(q.device), "lse": lse.value.float().to(q.device)}


@functools.lru_cache(maxsize=4)
def _left_of(spec: Spec) -> dict[str, Tensor]:
    given = {
        name: arguments.make(spec.operand[name], shapes(spec)[name], f"{spec.seed}/{name}")
        for name in GIVEN
    }
    return left({**given, **spec.param})


def fill(spec: Spec, name: str, content: Tensor) -> Tensor:
    """Make out and LSE of the Spec's q, k and v."""
    return _left_of(spec)[name].clone() if name in ("out", "lse") else content


def _by_group(heads: Tensor, args: Arguments) -> Tensor:
    """``[B, H, N, D]`` added up over the query heads of each key head: ``[B, N, K, D]``."""
    kv_heads = args["k"].shape[2]
    groups: Tensor = heads.unflatten(1, (kv_heads, heads.shape[1] // max(kv_heads, 1)))
    return groups.sum(2).transpose(1, 2)


def _products(args: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and grad as ``[B, H, S, D]``, k and v as ``[B, H, N, D]``."""
    group = args["q"].shape[2] // max(args["k"].shape[2], 1)
    q, grad = (args[n].double().transpose(1, 2) for n in ("q", "grad"))
    k, v = (_attention.by_head(args[n].double(), group) for n in ("k", "v"))
    return q, k, v, grad


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """Exact gradients and their bounds.

    A probability errs relatively by ``r = expm1(2 e) + (8 + 2 sqrt(N)) a``, e that of a logit as
    in attention, plus half an ulp of the float32 LSE (not for float64). An element of dp is a sum
    of Dv products: ``(sqrt(Dv) + 2) a sum|grad v|``. A row's ``sum(p dp)`` is had of p and dp, or
    of the rounded output, and errs by what either does. So ds errs by ``p r |x| + p`` times the
    errors of x; a soft cap's slope by ``2 e / cap + 6 a``. Where ds and p meet q, k and grad in
    the input's dtype, they round with u; below its normal numbers with eta. Sums of n products
    add ``(sqrt(n) + 3) a`` of their magnitudes, and shares of query heads that are rounded u.
    """
    unit, dtype = rounding(args["q"].dtype), args["q"].dtype
    contract_field(contract, "row_sum", "of_rounded")
    low = contract_field(contract, "p_dtype", "float32", "input") == "input"
    u_p, eta_p = (unit.u, unit.eta) if low else (0.0, unit.tiny * unit.acc)
    factor = args["q"].shape[-1] ** -0.5 if args["scale"] is None else args["scale"]
    q, k, v, grad = _products(args)
    p, p_error, ds, ds_error = _slopes(args, q, v, grad)
    ds, ds_error = ds * factor, ds_error * abs(factor)
    ds_error = ds_error + ds.abs() * (u_p + 2 * unit.acc) + eta_p * (1 + abs(factor))
    p_error = p_error + p * u_p + eta_p
    terms = (q.shape[1] // max(args["k"].shape[2], 1) * q.shape[2]) ** 0.5 + 3
    dq, dq_error = ds @ k, ds_error @ k.abs()
    dq_error = dq_error + (k.shape[2] ** 0.5 + 3) * unit.acc * (ds.abs() @ k.abs())
    found = [(dq.transpose(1, 2), dq_error.transpose(1, 2))]
    for rows, error, right in ((ds, ds_error, q), (p, p_error, grad)):
        shares, size = rows.mT @ right, error.mT @ right.abs()
        size = size + terms * unit.acc * (rows.mT.abs() @ right.abs())
        found.append((_by_group(shares, args), _by_group(size + _share(shares, args, unit), args)))
    return tuple(
        Output(f"grad_{name}", value, value.abs() * unit.u + bound + unit.eta, dtype)
        for name, (value, bound) in zip(GIVEN, found, strict=True)
    )


def _share(shares: Tensor, args: Arguments, unit: Any) -> Tensor:
    """The rounding of a query head's share in the gradient of its key head."""
    alone = args["q"].shape[2] == args["k"].shape[2]
    return shares.abs() * 0.0 if alone else shares.abs() * unit.u + unit.eta


def _slopes(
    args: Arguments, q: Tensor, v: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p and ds with their errors, before they are rounded; ds without the scale."""
    unit, cap = rounding(args["q"].dtype), args["logits_soft_cap"]
    p, lse, e, seen = _attention.probabilities(args)
    keys, value_dim = p.shape[-1], v.shape[-1]
    known = torch.zeros_like(lse)
    if args["q"].dtype != torch.float64:
        known = lse.abs().masked_fill(~seen.any(-1), 0.0) * 2.0**-24
    relative = torch.expm1(2 * (e + known)) + (8 + 2 * keys**0.5) * unit.acc
    p_error = p * relative.unsqueeze(-1) + unit.tiny * seen
    dp, dp_size = grad @ v.transpose(-1, -2), grad.abs() @ v.abs().transpose(-1, -2)
    dp_error = (value_dim**0.5 + 2) * unit.acc * dp_size
    out = p @ v
    of_rounded = grad.abs() * (out.abs() * (unit.u + (value_dim**0.5 + 2) * unit.acc) + unit.eta)
    of_sum = p_error * dp.abs() + p * (dp_error + (keys**0.5 + 2) * unit.acc * dp.abs())
    total = (p * dp).sum(-1, keepdim=True)
    total_error = of_rounded.sum(-1, keepdim=True) + of_sum.sum(-1, keepdim=True)
    rows = args["grad_lse"]
    more = 0 * total if rows is None else rows.double().transpose(1, 2).unsqueeze(-1)
    x, sizes = dp - total + more, dp.abs() + total.abs() + more.abs()
    x_error = dp_error + total_error + 4 * unit.acc * sizes
    ds, ds_error = p * x, p_error * (x.abs() + x_error) + p * x_error
    if cap > 0:
        slope = 1 - (_attention.logits(args)[0] / cap) ** 2
        slope_error = (2 * e / cap + 6 * unit.acc).unsqueeze(-1)
        ds, ds_error = ds * slope, ds_error * (slope + slope_error) + ds.abs() * slope_error
    return p, p_error, ds, ds_error


def gradient_of(args: Arguments) -> Callable[[Any], tuple[Output, ...]]:
    """The oracle of arguments wherever they are, as a function of the contract."""
    on_cpu = {n: a.cpu() if isinstance(a, Tensor) else a for n, a in args.items()}
    return lambda contract: oracle(on_cpu, contract)
