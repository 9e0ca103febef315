"""Rows of quantizations: what each kernel has to get right, or to refuse."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.declarations._quantization import AMAX_FLOOR, fp8_of, largest

from .kernels import BF16, FP32, HALF, Kernels, Outputs, judge, require, same
from .scenario import scenario

FP8 = ("quantize_fp8_per_token", "quantize_fp8_per_group", "quantize_fp8_per_tensor")
INT8 = ("quantize_int8_per_token",)
ROWS = (*FP8[:2], *INT8)
DTYPES = (HALF, BF16, FP32)
# Values of a row whose scale is 1, and their codes, of e4m3fn and of e4m3fnuz.
_TIES = {
    448.0: {272: 256, 300: 288, 304: 320, 440: 448, 448: 448},
    240.0: {136: 128, 152: 160, 200: 192, 240: 240},
}


def _row(kernels: Kernels, dtype: torch.dtype, *values: float) -> Tensor:
    """One row of 128 elements that begins with these."""
    row = torch.zeros(1, 128)
    row[0, : len(values)] = torch.tensor(values)
    return row.to(dtype).to(kernels.device)


@scenario("Q1", "Q15", ops=(*FP8, *INT8), dtypes=DTYPES)
def no_tokens_and_then_some(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """A launch of no blocks divides by zero or fails, and that may surface in the next call."""
    x = kernels.normal(3, 256, dtype=dtype)
    for empty in (x[:0], x[:, :0]):
        found = kernels.takes(op, empty)
        if found is not None:
            shape = tuple(found[0].shape)
            require(f"Q1: {shape} of {tuple(empty.shape)}", shape == tuple(empty.shape))
    kernels.proven(op, x)


@scenario("Q2", "Q3", ops=(*FP8, *INT8), dtypes=DTYPES)
def zeros_have_one_finite_scale(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """The floor is the declared one, whatever the layout."""
    zeros = kernels.full((4, 256), 0.0, dtype)
    q, scale = kernels.proven(op, zeros)
    require("Q3: a code that isn't 0", (q.float() == 0).all())
    floor = AMAX_FLOOR / largest(q.dtype)
    require("Q3: another scale", ((scale - floor).abs() <= 1e-6 * floor).all())
    found = kernels.takes(op, kernels.place(zeros, "row_stride"))
    if found is not None:
        same("Q2", found, (q, scale))


@scenario("Q5", ops=FP8, dtypes=DTYPES)
def codes_are_nearest_and_reach_the_largest(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """The largest code is among the values, so that their scale is 1."""
    top = largest(fp8_of(kernels.full((), 0.0)))
    values, codes = (list(part) for part in (_TIES[top].keys(), _TIES[top].values()))
    for sign in (1, -1):
        q, scale = kernels.proven(op, _row(kernels, dtype, *(sign * v for v in values)))
        require(f"Q5: a scale of {float(scale.reshape(-1)[0])}", (scale == 1).all())
        found = q[0, : len(values)].float().tolist()
        require(f"Q5: {found} of {values}", found == [sign * code for code in codes])


@scenario("Q6", "Q7", ops=FP8, dtypes=DTYPES)
def bytes_are_of_the_dtype_that_names_them(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """448 is the byte 0x7E of e4m3fn, and 240 is 0x7F of e4m3fnuz; zero is all zeros in both."""
    flavor = fp8_of(kernels.full((), 0.0))
    fnuz = flavor == torch.float8_e4m3fnuz
    x = _row(kernels, dtype, largest(flavor), 2.0, -2.0, -0.0)
    q, _ = kernels.proven(op, x)
    require(f"Q6: {q.dtype}", q.dtype == flavor)
    wanted = [0x7F, 0x48, 0xC8] if fnuz else [0x7E, 0x40, 0xC0]
    found = q.view(torch.uint8)[0].tolist()
    require(f"Q7: bytes {found[:4]}", found[:3] == wanted)
    require(f"Q6: zero is {found[3]}", found[3] in ((0,) if fnuz else (0, 0x80)))


@scenario("Q9", ops=("quantize_fp8_per_token", *INT8), dtypes=[HALF], gigabytes=16)
def offsets_past_31_bits(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    width = 8192 if kernels.far >= 2**31 else 64
    rows = kernels.far // width + 8
    x = kernels.full((rows, width), 0.0, dtype)
    last = slice(rows - 9, rows)  # one of them before the limit
    x[last] = kernels.normal(9, width, dtype=dtype)
    found = kernels(op, x)
    few: Outputs = tuple(out[last] for out in found)
    judge(op, (x[last].clone(),), few)
    same("Q9", few, kernels(op, x[last].clone()))


@scenario("Q10", ops=INT8, dtypes=DTYPES)
def whole_numbers_are_symmetric(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    """The largest magnitude is 127 at either sign, at any scale."""
    for size in (127.5, 128.0, 128.5, 1.0):
        q, _ = kernels.proven(op, _row(kernels, dtype, size, -size))
        require(f"Q10: {q[0, :2].tolist()} of {size}", q[0, :2].tolist() == [127, -127])


@scenario("Q11", ops=INT8, dtypes=DTYPES)
def halves_go_to_even(kernels: Kernels, op: str, dtype: torch.dtype) -> None:
    q, scale = kernels.proven(op, _row(kernels, dtype, 127.0, 0.5, 1.5, 2.5, -0.5, -2.5, 126.5))
    require(f"Q11: a scale of {float(scale)}", float(scale) == 1)
    require(f"Q11: {q[0, :7].tolist()}", q[0, :7].tolist() == [127, 0, 2, 2, 0, -2, 126])
