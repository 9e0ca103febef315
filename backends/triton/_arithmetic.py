"""Arithmetic in fewer instructions than the language's own, where a kernel is bound by them."""

from __future__ import annotations

import triton.language as tl

from ._launch import device_function

__all__ = ["larger", "narrowed", "reciprocal", "rounded", "widened"]


@device_function
def reciprocal(x: tl.tensor) -> tl.tensor:
    """Give 1 / x of numbers that are neither tiny nor huge, within two units in the last place.

    A division of float32 is made for any numbers: five instructions for one.
    """
    if x.dtype == tl.float32 and tl.target_info.is_cuda():
        found = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1
        )
    else:
        found = 1.0 / x
    return found


@device_function
def narrowed(v: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Round float32 to the dtype that a pointer is of.

    NVIDIA's GPUs have one instruction for two numbers, and a slow one for one.
    """
    narrow: tl.constexpr = like.dtype.element_ty
    pairs: tl.constexpr = v.numel > 1 and tl.target_info.is_cuda()
    if narrow == tl.bfloat16 and pairs:
        found = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [v], tl.bfloat16, is_pure=True, pack=2
        )
    elif narrow == tl.float16 and pairs:
        found = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [v], tl.float16, is_pure=True, pack=2
        )
    else:
        found = v.to(narrow)
    return found


@device_function
def larger(size: tl.tensor, v: tl.tensor) -> tl.tensor:
    """Give the larger one of size and of the magnitude of v, where NaN counts as nothing."""
    if v.dtype == tl.bfloat16 and v.numel > 1 and tl.target_info.is_cuda():
        found = tl.inline_asm_elementwise(
            "{.reg .b32 both; abs.bf16x2 both, $2; max.bf16x2 $0, $1, both;}",
            "=r,r,r", [size, v], tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif v.dtype == tl.float16 and v.numel > 1 and tl.target_info.is_cuda():
        found = tl.inline_asm_elementwise(
            "{.reg .b32 both; abs.f16x2 both, $2; max.f16x2 $0, $1, both;}",
            "=r,r,r", [size, v], tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        found = tl.maximum(size, tl.abs(v)).to(v.dtype)
    return found


@device_function
def widened(v: tl.tensor) -> tl.tensor:
    """Give float32 of numbers that are narrower, float64 and float32 as they are.

    Of two bfloat16 in a register each takes one instruction, of which a conversion has two.
    """
    if v.dtype == tl.bfloat16 and v.numel > 1 and tl.target_info.is_cuda():
        found = tl.inline_asm_elementwise(
            "{shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;}",
            "=r,=r,r", [v], tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    elif v.dtype == tl.float64:
        found = v
    else:
        found = v.to(tl.float32)
    return found


@device_function
def rounded(v: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Round float32 to the dtype that a pointer is of, and give float32 again."""
    return widened(narrowed(v, like))
