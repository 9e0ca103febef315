"""Arithmetic in fewer instructions than the language's own, where a kernel is bound by them."""

from __future__ import annotations

import triton.language as tl

from ._launch import device_function

__all__ = ["reciprocal", "rounded"]


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
def rounded(v: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Round float32 to the dtype that a pointer is of, and give float32 again.

    NVIDIA's GPUs have one instruction for two numbers, and a slow one for one, which is what
    becomes of a conversion there and back.
    """
    narrow: tl.constexpr = like.dtype.element_ty
    pairs: tl.constexpr = v.numel > 1 and tl.target_info.is_cuda()
    if narrow == tl.bfloat16 and pairs:
        found = tl.inline_asm_elementwise(
            "{.reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2;"
            "shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000;}",
            "=r,=r,r,r", [v], tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    elif narrow == tl.float16 and pairs:
        found = tl.inline_asm_elementwise(
            "{.reg .b32 both; .reg .f16 low, high; cvt.rn.f16x2.f32 both, $3, $2;"
            "mov.b32 {low, high}, both; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high;}",
            "=f,=f,f,f", [v], tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        found = v.to(narrow).to(tl.float32)
    return found
