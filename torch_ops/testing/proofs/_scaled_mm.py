"""Proof of the products of quantized matrices: what float8 and int8 share.

Examples have a dtype of the result; that of the matrices is the op's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.declarations._scaled_mm import BLOCK, blocks, forms
from torch_ops.testing import draw as pieces
from torch_ops.testing._hypothesis import DrawFn
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.arithmetic import contract_field, rounding
from torch_ops.testing.laws import (
    alone,
    flipped,
    in_range,
    permuted_rows,
    rounding_bias,
    safe_exponents,
    scaled,
    scaled_pair,
    twice,
)
from torch_ops.testing.layouts import LAYOUTS
from torch_ops.testing.proof import Arguments, Law, Output, Pair, Proof, Shapes, Trial
from torch_ops.testing.proofs._scaled_mm_faults import mutants
from torch_ops.testing.spec import Operand, Spec

ARGUMENTS = ("a", "b", "scale_a", "scale_b", "out_dtype", "bias")
TENSOR, ROW, GROUP = 0, 1, 2  # what a scale is for
REGIMES = ("normal", "grid", "sparse", "ones", "zeros", "one_hot", "arange17", "ties", "bytes")
SCALES = ("near_one", "ones", "normal", "rows", "small", "zeros", "tiny", "grid")
DIMS: dict[str, dict[str, int]] = {
    "one": {"m": 1, "n": 1, "k": 1},
    "odd": {"m": 7, "n": 33, "k": 65},
    "pow2": {"m": 16, "n": 64, "k": 256},
    "tall": {"m": 129, "n": 16, "k": 32},
    "wide": {"m": 3, "n": 272, "k": 144},
    "deep": {"m": 2, "n": 8, "k": 1040},
    "blocks": {"m": 32, "n": 256, "k": 384},
}
AXES: dict[str, Sequence[Any]] = {
    "layout": LAYOUTS,
    "b_layout": ("transposed", "contig", "row_stride", "misalign"),
    "dims": tuple(DIMS),
    "regime": ("normal", "grid", "bytes", "ones", "one_hot", "zeros"),
    "scale": ("near_one", "normal", "rows", "small", "tiny"),
    "forms": ((TENSOR, TENSOR), (ROW, ROW), (GROUP, GROUP), (ROW, TENSOR), (TENSOR, ROW)),
    "bias": ("absent", "near_one", "normal"),
}
# m, n, k: projections of Llama-3 8B and DeepSeek-V3 at decode and prefill
NAMED = (
    (1, 4096, 4096), (16, 6144, 4096), (64, 28672, 4096), (128, 4096, 14336), (512, 7168, 2048),
    (4096, 4096, 4096), (8192, 8192, 8192), (16, 128, 256), (33, 576, 128), (1, 256, 256),
    (5, 128, 384), (64, 192, 512), (130, 64, 512), (17, 40, 1024), (3, 16, 16),
)  # fmt: skip
# Those that have one scale a matrix as well, and no more, as some libraries take them.
NAMED_OF_TENSORS = (
    (16, 128, 256), (33, 576, 128), (1, 256, 256), (5, 128, 384), (64, 192, 512), (130, 64, 512),
    (3, 16, 16),
)  # fmt: skip


def shapes(spec: Spec) -> Shapes:
    """Matrices, their scales by form, and a bias."""
    d = spec.dim
    m, n, k = d["m"], d["n"], d["k"]
    left = {TENSOR: (), ROW: (m, 1), GROUP: (m, blocks(k))}
    right = {TENSOR: (1,), ROW: (1, n), GROUP: (blocks(k), blocks(n))}
    return {
        "a": (m, k), "b": (k, n), "scale_a": left[d["form_a"]], "scale_b": right[d["form_b"]],
        "bias": (n,),
    }  # fmt: skip


def strategy(op: str, kind: str) -> Callable[[str, int], Any]:
    """Strategy of Specs with matrices of a dtype."""

    @st.composite
    def draw(draw: DrawFn, dtype: str, budget: int) -> Spec:
        m = draw(pieces.tokens(min(budget, 160)))
        k = draw(pieces.size(min(budget // m, 1100)))
        dims = {"m": m, "n": draw(pieces.size(min(budget // max(m, k), 600))), "k": k}
        both = st.sampled_from((TENSOR, ROW, GROUP))
        dims |= {"form_a": draw(both), "form_b": draw(both)}
        shape = shapes(Spec.of(op, dims, {}))
        operands = {n: draw(pieces.operand(kind, shape[n], REGIMES)) for n in ("a", "b")}
        for name in ("scale_a", "scale_b"):
            operands[name] = draw(pieces.operand("float32", shape[name], SCALES))
        if draw(st.booleans()):
            of = draw(st.sampled_from((dtype, "float32")))
            operands["bias"] = draw(pieces.operand(of, shape["bias"], SCALES))
        return Spec.of(op, dims, operands, {"out_dtype": dtype}, draw(pieces.seeds()))

    return draw


def row(op: str, kind: str) -> Callable[[str, Mapping[str, Any]], Spec]:
    """Maker of Specs from rows of the covering array."""

    def spec_of(dtype: str, choice: Mapping[str, Any]) -> Spec:
        dims = dict(DIMS[choice["dims"]])
        if choice["layout"] == "int64_stride":
            dims["m"] = 1
        dims |= dict(zip(("form_a", "form_b"), choice["forms"], strict=True))
        others = ("contig", "row_stride", "transposed", "misalign")
        operands = {
            "a": Operand(kind, choice["layout"], choice["regime"]),
            "b": Operand(kind, choice["b_layout"], pieces.pick(choice, "b", REGIMES[:3])),
            "scale_a": Operand("float32", pieces.pick(choice, "sa", others), choice["scale"]),
            "scale_b": Operand("float32", pieces.pick(choice, "sb", others), "near_one"),
        }
        if choice["bias"] != "absent":
            of = pieces.pick(choice, "bias", (dtype, "float32"))
            operands["bias"] = Operand(of, "contig", choice["bias"])
        spec = Spec.of(op, dims, operands, {"out_dtype": dtype}, seed=1)
        return pieces.fitted(spec, shapes(spec))

    return spec_of


def plain(op: str, kind: str, dims: Mapping[str, int], dtype: str, *, bias: bool = False) -> Spec:
    """A Spec of ordinary content: `a` row-major, `b` column-major, one scale a row and a column."""
    sizes = {"form_a": ROW, "form_b": ROW, **dims}
    operands = {
        "a": Operand(kind), "b": Operand(kind, "transposed"),
        "scale_a": Operand("float32", regime="near_one"),
        "scale_b": Operand("float32", regime="near_one"),
    }  # fmt: skip
    if bias:
        operands["bias"] = Operand(dtype)
    spec = Spec.of(op, sizes, operands, {"out_dtype": dtype})
    return pieces.fitted(spec, shapes(spec))


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """Exact product, and its bound.

    With ``S = sum |a b s_a s_b|`` and ``T = sum over groups of |their scaled sums|``, scales, sums
    of G groups and a bias c cost ``(6 + G) a T + 4 a (|y| + |c|)``, the result's rounding
    ``u |y| + eta``. Sums of int8 are exact. Those of float8 by tensor cores are not: each of the
    ``n = K / 32`` steps aligns its products and what was summed to the largest of them and cuts
    each behind 13 bits, ``2^-13 sqrt(33) n (P + M)`` in all, with P the largest partial sum and M
    the largest product; float32 otherwise, ``(2 sqrt(K) + 4) a S``.
    """
    a, b, dtype = args["a"].double(), args["b"].double(), args["out_dtype"]
    kind = contract_field(contract, "accumulator", "int32", "tensor_core")
    unit = rounding(dtype)
    left, right, _, blocked = forms(args["b"], args["scale_a"].double(), args["scale_b"].double())
    if blocked:
        right = right.repeat_interleave(BLOCK, 1)[:, : b.shape[1]]
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    absolute, sums, partial, product = (torch.zeros_like(total) for _ in range(4))
    groups = max(left.shape[1], right.shape[0])
    size = BLOCK if groups > 1 else max(a.shape[1], 1)
    for g, i in enumerate(range(0, a.shape[1], size)):
        scale = left[:, min(g, left.shape[1] - 1), None] * right[min(g, right.shape[0] - 1)]
        x, y = a[:, i : i + size], b[i : i + size]
        found = scale * (x @ y)
        total, sums = total + found, sums + found.abs()
        absolute = absolute + scale.abs() * (x.abs() @ y.abs())
        if kind == "tensor_core":
            partial, product = _steps(x, y, scale, partial, product)
    bias = args["bias"]
    value = total if bias is None else total + bias.double()
    offset = total.new_zeros(()) if bias is None else bias.double().abs()
    bound = unit.u * value.abs() + unit.eta + (6 + groups) * unit.acc * sums
    bound = bound + 4 * unit.acc * (value.abs() + offset) + 4 * unit.tiny * unit.acc
    bound = bound + unit.tiny * unit.acc * absolute / absolute.clamp(min=1)
    if kind == "tensor_core":
        steps = -(-a.shape[1] // 32)
        bound = bound + (2 * a.shape[1] ** 0.5 + 4) * unit.acc * absolute
        bound = bound + 2.0**-13 * 33**0.5 * steps * (partial + product)
    return (Output("out", value, bound, dtype),)


def _steps(
    x: Tensor, y: Tensor, scale: Tensor, partial: Tensor, product: Tensor
) -> tuple[Tensor, Tensor]:
    """Raise the largest partial sum and the largest product by those of a group."""
    running = torch.zeros_like(partial)
    for i in range(0, x.shape[1], 32):
        running = running + x[:, i : i + 32] @ y[i : i + 32]
        partial = torch.maximum(partial, (running * scale).abs())
    if x.shape[1]:
        most = x.abs().amax(1, keepdim=True) * y.abs().amax(0, keepdim=True)
        product = torch.maximum(product, most * scale.abs())
    return partial, product


def _small(value: Tensor) -> Tensor:
    """Whole numbers from -2 to 2 that depend on the place alone."""
    places = torch.arange(value.numel(), device=value.device)
    return ((places * 7) % 5 - 2).view(value.shape).to(value.dtype)


def _exact(trial: Trial) -> Sequence[Pair] | None:
    """Sums of small whole numbers are exact in every accumulator."""
    args = trial.args
    if args["a"].shape[1] > 2000:
        return None
    a, b = _small(args["a"]), _small(args["b"])
    one = torch.ones((), device=a.device)
    (got,) = trial.run(a=a, b=b, scale_a=one, scale_b=one, bias=None)
    exact = (a.cpu().double() @ b.cpu().double()).to(args["out_dtype"])
    return [Pair("out of small whole numbers", got.cpu(), exact)]


def _powers(trial: Trial) -> Sequence[Pair] | None:
    scales = {n: trial.args[n] for n in ("scale_a", "scale_b")}
    if not all(in_range(s, *safe_exponents(torch.float32)) for s in scales.values()):
        return None
    (base,) = trial.run(bias=None)
    pairs = []
    for name, scale in scales.items():
        (got,) = trial.run(**{name: scaled(scale, 3)}, bias=None)
        pairs.append(scaled_pair(f"out, {name} times 8", got, base, 3))
    return pairs


def _negated(trial: Trial) -> Sequence[Pair]:
    pairs = []
    bias = trial.args["bias"]
    for name in ("scale_a", "scale_b"):
        (got,) = trial.run(**{name: -trial.args[name]}, bias=None if bias is None else -bias)
        pairs.append(Pair(f"out, {name} and bias negated", got, -trial.outputs[0]))
    return pairs


def _nothing(trial: Trial) -> Sequence[Pair] | None:
    """Zeros times whatever is finite leave the bias."""
    bias = trial.args["bias"]
    wanted = torch.zeros_like(trial.outputs[0])
    if bias is not None:
        wanted = wanted + bias.float().to(wanted.dtype)
    pairs = []
    for name in ("a", "b", "scale_a", "scale_b"):
        (got,) = trial.run(**{name: torch.zeros_like(trial.args[name])})
        pairs.append(Pair(f"out where {name} is zero", got, wanted))
    return pairs


def _no_bias(trial: Trial) -> Sequence[Pair]:
    n = trial.args["b"].shape[1]
    zero = torch.zeros(n, dtype=trial.args["out_dtype"], device=trial.args["a"].device)
    (with_zeros,), (without,) = trial.run(bias=zero), trial.run(bias=None)
    return [Pair("out with a bias of zeros, against none", with_zeros, without)]


def _columns(trial: Trial) -> Sequence[Pair] | None:
    """Columns don't know each other: one alone gives what it gives among others."""
    args = trial.args
    n = args["b"].shape[1]
    _, right, _, blocked = forms(args["b"], args["scale_a"], args["scale_b"])
    if n < 2 or (blocked and n % BLOCK):
        return None
    changed = {"b": flipped(args["b"], 1)}
    if right.shape[1] > 1:
        changed["scale_b"] = flipped(args["scale_b"], 1)
    if args["bias"] is not None:
        changed["bias"] = flipped(args["bias"], 0)
    (got,) = trial.run(**changed)
    (expected,) = oracle({**trial.args, **changed}, trial.contract)
    turned = flipped(trial.outputs[0], 1)
    return [Pair("out, columns reversed", got, turned, twice(expected.bound))]


def _form_of_rows(args: Arguments) -> tuple[str, ...]:
    return ("a", "scale_a") if args["scale_a"].numel() > 1 else ("a",)


def _rows(trial: Trial) -> Sequence[Pair] | None:
    return permuted_rows(_form_of_rows(trial.args), "", oracle).pairs(trial)


def _alone(trial: Trial) -> Sequence[Pair] | None:
    return alone(_form_of_rows(trial.args)).pairs(trial)


LAWS = (
    Law("exact", "f of small whole numbers is exact", _exact),
    Law("powers", "f(8 s_a) == 8 f == f(8 s_b), without a bias", _powers),
    Law("odd", "f(-s_a, -bias) == -f == f(-s_b, -bias)", _negated),
    Law("nothing", "zeros leave the bias", _nothing),
    Law("no_bias", "f(bias=0) == f(bias=None)", _no_bias),
    Law("column_permutation", "columns don't know each other", _columns),
    Law("row_permutation", "rows don't know each other", _rows),
    Law("batch_invariance", "f(args)[i] == f(args[i])", _alone, declared="batch_invariant"),
)


def proof_of_product(op: str, kind: str, specials: Sequence[str]) -> Proof:
    """The proof for matrices of a dtype.

    Args:
        op: Name of the op.
        kind: Dtype of the matrices.
        specials: Special values that the matrices may hold.
    """
    exact = kind == "int8"  # else the bound is of more than the one rounding, whose bias it hides

    def zero(dtype: str) -> list[Spec]:
        return [plain(op, kind, DIMS["odd"] | {name: 0}, dtype, bias=True) for name in "mnk"]

    def classes(dtype: str) -> list[Spec]:
        found = []
        for special in specials:
            spec = plain(op, kind, DIMS["odd"], dtype)
            odd = Operand(kind, specials=((70, special),))
            found.append(spec.replace(operands={**spec.operand, "a": odd}))
        for special in ("nan", "inf"):
            spec = plain(op, kind, DIMS["odd"], dtype)
            odd = Operand("float32", regime="ones", specials=((1, special),))
            found.append(spec.replace(operands={**spec.operand, "scale_a": odd}))
        return found

    def named(dtype: str) -> dict[str, Spec]:
        of_tensors = {"form_a": TENSOR, "form_b": TENSOR}
        return {
            f"{m}x{n}x{k}": plain(op, kind, {"m": m, "n": n, "k": k}, dtype) for m, n, k in NAMED
        } | {
            f"{m}x{n}x{k} by tensor": plain(op, kind, {"m": m, "n": n, "k": k, **of_tensors}, dtype)
            for m, n, k in NAMED_OF_TENSORS
        }

    return Proof(
        op=op,
        arguments=ARGUMENTS,
        shapes=shapes,
        draw=strategy(op, kind),
        axes=AXES,
        row=row(op, kind),
        zero=zero,
        classes=classes,
        named=named,
        oracle=oracle,
        laws=(*LAWS, rounding_bias()) if exact else LAWS,
        mutants=mutants(torch.float64 if exact else torch.float32, exact=exact),
        cost=4,
    )
