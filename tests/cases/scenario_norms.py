"""Rows of norms: what each kernel has to get right, or to refuse."""

from __future__ import annotations

import torch

from torch_ops import NoBackwardError
from torch_ops.declarations import catalogue

from .kernels import BF16, FP32, HALF, Kernels, Outputs, judge, require, same
from .scenario import scenario

FUSED = ("fused_add_rms_norm", "fused_add_rms_norm_")
PLAIN = ("rms_norm", "gemma_rms_norm", "layer_norm")
DTYPES = (HALF, BF16, FP32)
LAYOUTS = ("contig", "row_stride", "transposed", "slice_offset", "misalign", "step2", "unbind")


def _vectors(kernels: Kernels, op: str, dtype: torch.dtype, hidden: int) -> Outputs:
    """A weight; for layer_norm a bias too, both in float32, which each of its kernels takes."""
    if op != "layer_norm":
        return (kernels.normal(hidden, dtype=dtype, seed=2),)
    return kernels.normal(hidden, seed=2), kernels.normal(hidden, seed=3)


def _wide(kernels: Kernels, op: str, dtype: torch.dtype, hidden: int) -> None:
    x, residual = (kernels.normal(3, hidden, dtype=dtype, seed=i) for i in range(2))
    weight = kernels.normal(hidden, dtype=dtype, seed=2)
    kernels.proven(op, x, residual, weight)
    moved = kernels.place(x, "misalign"), kernels.place(residual, "misalign"), weight
    found = kernels.takes(op, *moved)
    if found is not None:
        judge(op, moved, found)


@scenario("N1", ops=FUSED, dtypes=DTYPES)
def a_width_that_no_vector_divides_among_threads(
    kernels: Kernels, op: str, dtype: torch.dtype
) -> None:
    _wide(kernels, op, dtype, 3584)


@scenario("N2", ops=FUSED, dtypes=DTYPES)
def a_row_longer_than_static_shared_memory(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    _wide(kernels, op, dtype, 16384)


@scenario("N3", ops=PLAIN, dtypes=DTYPES)
def a_stride_past_31_bits_that_is_never_stepped(
    kernels: Kernels, op: str, dtype: torch.dtype
) -> None:
    x, vectors = kernels.normal(1, 128, dtype=dtype), _vectors(kernels, op, dtype, 128)
    far = x.as_strided((1, 128), (2**31, 1))
    same("N3", kernels(op, far, *vectors), kernels(op, x, *vectors))


@scenario("N5", ops=FUSED, dtypes=[HALF], gigabytes=96)
def offsets_past_31_bits(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    hidden = 32768 if kernels.far >= 2**31 else 64
    rows = kernels.far // hidden + 8
    x, residual = (kernels.full((rows, hidden), 0.0, dtype) for _ in range(2))
    last = slice(rows - 9, rows)  # one of them before the limit
    x[last] = kernels.normal(9, hidden, dtype=dtype)
    residual[last] = kernels.normal(9, hidden, dtype=dtype, seed=1)
    args = x, residual, kernels.normal(hidden, dtype=dtype, seed=2)
    few = x[last].clone(), residual[last].clone(), args[2]
    judge(op, few, [out[last] for out in kernels(op, *args)])


@scenario("N9", ops=FUSED, dtypes=DTYPES)
def a_fused_norm_is_that_of_the_stored_sum(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    x, residual = (kernels.normal(33, 257, dtype=dtype, seed=i) for i in range(2))
    weight = kernels.normal(257, dtype=dtype, seed=2)
    out, total = kernels.proven(op, x, residual, weight)
    again = kernels(op, total.clone(), torch.zeros_like(total), weight)
    same("N9", again, (out, total))
    judge("rms_norm", (total, weight), [out])


@scenario("N10", ops=PLAIN, dtypes=DTYPES)
def an_odd_width_leaves_following_rows_alone(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    for hidden in (768, 769):
        x, vectors = kernels.normal(7, hidden, dtype=dtype), _vectors(kernels, op, dtype, hidden)
        kernels.proven(op, x, *vectors)
        for row in range(7):
            found = kernels.takes(op, x[row], *vectors)
            if found is not None:
                judge(op, (x[row], *vectors), found)


@scenario("N11", ops=FUSED, dtypes=(HALF, BF16))
def rounding_has_no_bias(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """The mean error is within 6 of its standard errors: truncation is at -50."""
    x, residual = (kernels.normal(1024, 64, seed=i).abs().to(dtype) + 1 for i in range(2))
    ones = kernels.full((64,), 1.0, dtype)
    out, total = kernels.proven(op, x, residual, ones)
    exact = total.double() * (total.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    for got, want in ((out, exact), (total, x.double() + residual.double())):
        error = (got.double() - want) / want.abs()
        score = float(error.mean() / (error.std() / error.numel() ** 0.5))
        require(f"N11: mean error of {score:.1f} standard errors", abs(score) < 6)


@scenario("N17", ops=PLAIN, dtypes=DTYPES)
def a_last_stride_of_more_than_one(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    for size in (2, 40):
        x, vectors = kernels.normal(size, size, dtype=dtype), _vectors(kernels, op, dtype, size)
        same("N17", kernels(op, x.t(), *vectors), kernels(op, x.t().contiguous(), *vectors))


@scenario("N18", "N21", ops=PLAIN, dtypes=(BF16, FP32))
def gradients_that_are_expanded_or_have_two_uses(
    kernels: Kernels, op: str, dtype: torch.dtype
) -> None:
    """As of `sum`, and of an output with a second consumer; or there is no backward."""
    x, vectors = kernels.normal(4, 64, dtype=dtype), _vectors(kernels, op, dtype, 64)
    x.requires_grad_()
    try:
        out = kernels.accepting(op, x, *vectors).call(x, *vectors)
    except NoBackwardError:
        return
    require("N18: the result has a gradient", out.requires_grad)
    one = kernels.full((), 1.0, dtype)
    expanded, dense = one.expand(4, 64), one.expand(4, 64).contiguous()
    found, wanted = (
        torch.autograd.grad(out, x, grad, retain_graph=True) for grad in (expanded, dense)
    )
    same("N18", found, wanted)
    same("N21", dense, expanded)


@scenario("N19", ops=PLAIN, dtypes=DTYPES)
def seven_by_seven_layouts(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    x, (weight, *bias) = kernels.normal(6, 40, dtype=dtype), _vectors(kernels, op, dtype, 40)
    wanted = kernels(op, x, weight, *bias)
    for layout in LAYOUTS:
        for other in LAYOUTS:
            placed = kernels.place(weight, "step2" if other == "transposed" else other)
            found = kernels.takes(op, kernels.place(x, layout), placed, *bias)
            if found is not None:
                same(f"N19: x {layout}, weight {other}", found, wanted)


@scenario("N19", ops=FUSED, dtypes=DTYPES)
def seven_by_seven_layouts_of_a_sum(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    x, residual = (kernels.normal(6, 40, dtype=dtype, seed=i) for i in range(2))
    weight = kernels.normal(40, dtype=dtype, seed=2)
    wanted = kernels(op, x, residual, weight)
    for layout in LAYOUTS:
        for other in LAYOUTS:
            placed = kernels.place(x, layout), kernels.place(residual, other)
            found = kernels.takes(op, *placed, weight)
            if found is not None:
                same(f"N19: x {layout}, residual {other}", found, wanted)


@scenario("N23", ops=PLAIN, dtypes=DTYPES)
def a_row_alone_and_among_many(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """Within the bound at every number of rows; bit for bit where the op declares that."""
    x, vectors = kernels.normal(300, 96, dtype=dtype), _vectors(kernels, op, dtype, 96)
    (whole,) = kernels.proven(op, x, *vectors)
    for rows in (1, 2, 255, 256, 257):
        (part,) = kernels.proven(op, x[:rows], *vectors)
        if catalogue()[op].contract.batch_invariant:
            same("N23", part, whole[:rows])


@scenario("N25", ops=["layer_norm"], dtypes=DTYPES)
def padding_of_a_row_is_not_counted(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    for hidden in (3, 17, 100, 257, 1000):
        x = kernels.normal(5, hidden, dtype=dtype) + 3
        weight, bias = kernels.full((hidden,), 1.0), kernels.full((hidden,), 0.0)
        kernels.proven(op, x, weight, bias, 1e-5)


@scenario("N31", ops=["layer_norm"], dtypes=(BF16, FP32))
def a_constant_row_near_the_largest_float(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """Its mean may overflow and give NaN; no other number comes out, and other rows are right."""
    x = kernels.normal(3, 768, dtype=dtype)
    x[1] = 8.5e37
    weight, bias = kernels.full((768,), 1.0), kernels.normal(768, seed=1)
    (out,) = kernels(op, x, weight, bias)
    judge(op, (x[::2].clone(), weight, bias), [out[::2]])
    right = out[1].isnan().all() or torch.equal(out[1], bias.to(dtype))
    require(f"N31: the constant row is {out[1]}", right)
