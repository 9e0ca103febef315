"""scaled_mm_int8: the product of two int8 matrices, scaled."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import checks
from torch_ops.contracts import ScaledMatmulContract
from torch_ops.declarations import _scaled_mm as shared
from torch_ops.declare import op

_DTYPES = (torch.int8,)
_LONGEST = 131071  # 2^31 / 128^2


@op(
    contract=ScaledMatmulContract(accumulator="int32"),
    dtypes=(torch.float32, torch.float16, torch.bfloat16),
    order={"cuda": ("sgl_kernel", "torch", "triton", "inductor")},
)
def scaled_mm_int8(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply quantized matrices and undo their scaling.

    out = (a * scale_a) @ (b * scale_b) + bias

    Args:
        a: ``[M, K]`` int8; kernels want it row-major.
            K up to 131071, so that no sum leaves int32.
        b: ``[K, N]`` of the dtype of ``a``; kernels want it column-major.
        scale_a: float32: ``[]``, ``[1]`` or ``[1, 1]``, one for all; ``[M, 1]``, one a row; or
            ``[M, ceil(K / 128)]``, one for each 128 columns of a row.
        scale_b: float32: one for all; ``[1, N]``, one a column; or
            ``[ceil(K / 128), ceil(N / 128)]``, one for each block of 128 x 128.
        out_dtype: float16, bfloat16 or float32.
        bias: ``[N]`` of any floating dtype, added in float32, or None.

    Returns:
        ``[M, N]`` of ``out_dtype``, contiguous. Products are summed exactly;
        scales and bias are applied in float32, and the result is rounded
        once.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree.

    Source: blocks of scales as in DeepSeek-V3 (arXiv 2412.19437), section 3.3.
    """
    return shared.product((a, b, scale_a, scale_b), out_dtype, bias, torch.float64)


@scaled_mm_int8.check
def _check(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> None:
    shared.check("scaled_mm_int8", (a, b, scale_a, scale_b), out_dtype, bias, _DTYPES)
    if a.shape[1] > _LONGEST:
        checks.refuse("scaled_mm_int8", "a", f"of shape {list(a.shape)}", f"K up to {_LONGEST}")


@scaled_mm_int8.fake
def _fake(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
