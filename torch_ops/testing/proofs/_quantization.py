"""What the quantizations share: Specs, covering axes, and the oracle of codes and scales.

A form says what shares a scale; laws and faults see a call as ``[groups, elements]`` of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_ops.declarations._quantization import AMAX_FLOOR, fp8_of, largest
from torch_ops.testing import draw as pieces
from torch_ops.testing._hypothesis import DrawFn, SearchStrategy
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.arithmetic import contract_field
from torch_ops.testing.layouts import LAYOUTS
from torch_ops.testing.proof import Arguments, Output, Shapes
from torch_ops.testing.spec import Operand, Scalar, Spec
from torch_ops.testing.values import FINITE_SPECIALS

U32 = torch.finfo(torch.float32).eps / 2
ROWS = ("outer", "batch", "tokens")
REGIMES = (
    "normal", "zeros", "ones", "arange17", "grid", "sparse", "rows", "constant", "one_hot",
    "equal_rows", "alternating", "spiky", "sorted", "ties", "tiny", "small", "huge", "enormous",
)  # fmt: skip
SIZES = (128, 64, 16, 32, 1, 7)
SCALES = ("ones", "constant", "near_one")
DIMS: dict[str, dict[str, int]] = {
    "one": {"tokens": 1, "hidden": 1},
    "odd": {"tokens": 7, "hidden": 769},
    "pow2": {"tokens": 8, "hidden": 1024},
    "wide": {"tokens": 2, "hidden": 5125},
    "tall": {"tokens": 257, "hidden": 33},
    "deep": {"batch": 3, "tokens": 17, "hidden": 96},
    "single": {"hidden": 500},
}
# Tokens and width of activations of models.
NAMED = (
    (1, 4096), (16, 4096), (512, 4096), (4096, 4096), (16384, 8192), (4096, 14336), (7, 128),
    (8, 8192), (1, 65536),
)  # fmt: skip


def nearest(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The code nearest to float64 values, as float64; of two as near, the even one."""
    limit = largest(dtype)
    value = value.clamp(-limit, limit)
    if dtype == torch.int8:
        return value.round()
    info = torch.finfo(dtype)
    binade = torch.frexp(value.abs().clamp(min=info.tiny)).exponent - 1
    step = torch.ldexp(torch.full_like(value, info.eps), binade)
    return (value / step).round() * step


@dataclass(frozen=True)
class Form:
    """What shares a scale, and what codes are.

    Attributes:
        op: The op's name.
        per: ``token``, ``group`` or ``tensor``, as in the op's contract.
        codes: ``e4m3`` or ``int8``, as in the op's contract.
    """

    op: str
    per: str
    codes: str = "e4m3"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the op's arguments."""
        more = {"token": (), "group": ("group_size",), "tensor": ("scale",)}
        return ("x", *more[self.per])

    def dtype(self, x: Tensor) -> torch.dtype:
        """Dtype of the codes of a tensor."""
        return torch.int8 if self.codes == "int8" else fp8_of(x)

    def split(self, value: Tensor, args: Arguments) -> Tensor:
        """A tensor of the shape of x as ``[groups, elements]``."""
        if self.per == "tensor":
            return value.reshape(1, -1)
        width = args["group_size"] if self.per == "group" else value.shape[-1]
        return value.reshape(
            value.numel() // width if width else math.prod(value.shape[:-1]), width
        )

    def scales(self, x: Tensor, args: Arguments) -> tuple[int, ...]:
        """Shape of the scales of a tensor."""
        if self.per == "tensor":
            return (1,)
        width = x.shape[-1] // args["group_size"] if self.per == "group" else 1
        return (*x.shape[:-1], width)

    def params(self, spec_dims: Mapping[str, int]) -> dict[str, Scalar]:
        """The numbers of a call with these sizes."""
        return {"group_size": spec_dims["size"]} if self.per == "group" else {}


def shapes(spec: Spec) -> Shapes:
    """x has the row axes of the Spec, then a row of one or more groups."""
    dim = spec.dim
    width = dim["groups"] * dim["size"] if "size" in dim else dim["hidden"]
    found = {"x": (*(dim[n] for n in ROWS if n in dim), width)}
    return found | ({"scale": (1,)} if spec.op.endswith("per_tensor") else {})


def strategy(form: Form) -> Callable[[str, int], SearchStrategy[Spec]]:
    """Strategy of Specs."""

    @st.composite
    def specs(draw: DrawFn, dtype: str, budget: int) -> Spec:
        rank = draw(st.sampled_from((2, 1, 3, 4)))
        dims: dict[str, int] = {}
        for name in ROWS[len(ROWS) - rank + 1 :]:
            dims[name] = draw(pieces.tokens(budget) if name == "tokens" else st.integers(1, 3))
            budget //= dims[name]
        if form.per == "group":
            dims["groups"] = draw(st.integers(1, max(min(9, budget // 128), 1)))
            dims["size"] = draw(st.sampled_from(SIZES))
        else:
            dims["hidden"] = draw(pieces.size(budget))
        shape = (*list(dims.values())[: rank - 1], math.prod(list(dims.values())[rank - 1 :]))
        names = (*FINITE_SPECIALS, "max", "min", "tiny")
        operands = {"x": draw(pieces.operand(dtype, shape, REGIMES, names=names))}
        if form.per == "tensor" and draw(st.booleans()):
            operands["scale"] = Operand("float32", "contig", draw(st.sampled_from(SCALES)))
        return Spec.of(form.op, dims, operands, form.params(dims), draw(pieces.seeds()))

    return specs


def axes(form: Form) -> dict[str, Sequence[Any]]:
    """Axes of the covering array."""
    found: dict[str, Sequence[Any]] = {
        "layout": LAYOUTS,
        "regime": ("normal", "rows", "zeros", "constant", "tiny", "huge", "spiky", "ties"),
        "dims": tuple(DIMS),
    }
    if form.per == "group":
        found["size"] = SIZES[:4]
    return found | ({"scale": ("absent", *SCALES)} if form.per == "tensor" else {})


def row(form: Form) -> Callable[[str, Mapping[str, Any]], Spec]:
    """Maker of Specs from rows of the covering array."""

    def spec_of(dtype: str, choice: Mapping[str, Any]) -> Spec:
        dims = dict(DIMS[choice["dims"]])
        if choice["layout"] == "int64_stride":
            dims["tokens"] = 1
        if form.per == "group":
            size = choice["size"]
            dims |= {"groups": -(-dims.pop("hidden") // size), "size": size}
        names = (*ROWS, "hidden", "groups", "size")
        ordered = {name: dims[name] for name in names if name in dims}
        operands = {"x": Operand(dtype, choice["layout"], choice["regime"])}
        if choice.get("scale", "absent") != "absent":
            operands["scale"] = Operand("float32", "contig", choice["scale"])
        spec = Spec.of(form.op, ordered, operands, form.params(dims), seed=1)
        return pieces.fitted(spec, shapes(spec))

    return spec_of


def _plain(form: Form, lead: Mapping[str, int], hidden: int, operand: Operand) -> Spec:
    size = 128 if hidden % 128 == 0 and hidden else 11
    dims = {"groups": hidden // size, "size": size} if form.per == "group" else {"hidden": hidden}
    return Spec.of(form.op, {**lead, **dims}, {"x": operand}, form.params(dims))


def zero(form: Form) -> Callable[[str], list[Spec]]:
    """Specs without rows, with rows of no elements, and with an empty outer axis."""

    def specs(dtype: str) -> list[Spec]:
        sizes = (({"tokens": 0}, 128), ({"tokens": 3}, 0), ({"batch": 0, "tokens": 3}, 33))
        return [
            _plain(form, lead, hidden, Operand(dtype, layout))
            for lead, hidden in sizes
            for layout in ("contig", "row_stride")
        ]

    return specs


def classes(form: Form) -> Callable[[str], list[Spec]]:
    """Specs with NaN and infinities in single rows."""

    def specs(dtype: str) -> list[Spec]:
        return [
            _plain(form, {"tokens": 4}, 33, Operand(dtype, specials=((38, special), (97, "1"))))
            for special in ("nan", "inf", "-inf")
        ]

    return specs


def named(form: Form) -> Callable[[str], dict[str, Spec]]:
    """Activations of models, as ``tokens x width``; where a scale may be given, one is as well."""

    def specs(dtype: str) -> dict[str, Spec]:
        found = {}
        for tokens, hidden in NAMED:
            spec = _plain(form, {"tokens": tokens}, hidden, Operand(dtype))
            found[f"{tokens}x{hidden}"] = spec
        if form.per == "tensor":
            operands = {"x": Operand(dtype), "scale": Operand("float32", regime="near_one")}
            found["7x128 by a scale"] = Spec.of(form.op, {"tokens": 7, "hidden": 128}, operands, {})
        return found

    return specs


def exact_scale(groups: Tensor, dtype: torch.dtype) -> Tensor:
    """Exact scale ``[..., 1]`` of float64 ``[..., elements]``; the floor is a float32."""
    if groups.shape[-1] == 0:
        amax = groups.new_zeros((*groups.shape[:-1], 1))
    else:
        amax = groups.abs().amax(-1, keepdim=True)
    return amax.clamp(min=float(torch.tensor(AMAX_FLOOR))) / largest(dtype)


def near(
    value: Tensor, scale: Tensor, dtype: torch.dtype, units: float = 4
) -> tuple[Tensor, Tensor]:
    """The codes that a quotient may get, as the middle and half the width of an interval.

    A float32 quotient, or a product with a reciprocal, errs by less than ``4 u32``; by a power of
    two it is exact. So the code is one of those nearest to ``v (1 - d)``, v and ``v (1 + d)``, of
    which two are neighbours at most: nothing else lies between them.
    """
    exact = value / scale
    d = torch.where(torch.frexp(scale).mantissa == 0.5, 0.0, units * U32)
    ends = nearest(exact * (1 - d), dtype), nearest(exact * (1 + d), dtype)
    return (ends[0] + ends[1]) / 2, (ends[0] - ends[1]).abs() / 2


def _undefined(form: Form, groups: Tensor, args: Arguments) -> Tensor:
    """Which elements are undefined: all of a group with NaN or infinity, unless its scale is given.

    ``[groups, 1]``, or ``[groups, elements]`` with a given scale.
    """
    broken = ~groups.isfinite()
    return broken if args.get("scale") is not None else broken.any(-1, keepdim=True)


def outputs_of(form: Form, x: Tensor, args: Arguments) -> tuple[Output, Output]:
    """Codes, given the scales that came with them, and scales of exact values ``x``.

    A scale errs by the rounding of a division, or of a reciprocal and a product: ``2 u32``.
    """
    dtype, shape, scales = form.dtype(args["x"]), x.shape, form.scales(x, args)
    groups = form.split(x, args)
    undefined = _undefined(form, groups, args)
    groups = torch.where(undefined, 0.0, groups)
    exact, fixed = exact_scale(groups, dtype), args.get("scale")
    spread = torch.where(undefined, torch.inf, 2 * U32 * exact)
    if fixed is not None:
        exact = fixed.double().reshape(1, 1)
        scale = Output("scale", fixed.reshape(1), None, torch.float32)
    else:
        scale = Output("scale", exact.reshape(scales), spread.reshape(scales), torch.float32)

    def codes(found: Tensor, units: float) -> Output:
        middle, half = near(groups, found, dtype, units)
        half = torch.where(undefined, torch.inf, half)
        return Output("q", middle.reshape(shape), half.reshape(shape), dtype)

    def given(outputs: tuple[Tensor, ...]) -> Output:
        found = outputs[1].double().reshape(exact.shape)
        return codes(torch.where(undefined.any(-1, keepdim=True), exact, found), 4)

    return replace(codes(exact, 8), given=given), scale


def oracle(form: Form) -> Callable[[Arguments, Any], tuple[Output, ...]]:
    """Exact scales with their bound, and the codes that belong to the scales of a kernel."""

    def outputs(args: Arguments, contract: Any) -> tuple[Output, ...]:
        contract_field(contract, "codes", form.codes)
        contract_field(contract, "per", form.per)
        contract_field(contract, "rounding", "nearest_even")
        return outputs_of(form, args["x"].double(), args)

    return outputs
