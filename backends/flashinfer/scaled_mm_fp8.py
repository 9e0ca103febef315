"""FlashInfer's bmm_fp8 for one matrix: the product of cuBLASLt, scaled by one number each.

Sums aren't promoted to float32 in between (its fast accumulation), which the contract allows.

Groups of scales aren't handed over. Its gemm_fp8_nt_groupwise is for compute capability 10.0 and
12.0. Its fp8_blockscale_gemm_sm90 wants the scales of a column-major and padded, and has nvcc
compile a kernel for each N and K while it runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import limits

from . import _modules

__all__ = ["scaled_mm_fp8", "supports"]

_WORKSPACE = 32 << 20  # what FlashInfer gives cuBLASLt


def supports(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> str | None:
    if out_dtype != torch.bfloat16:  # cuBLAS has some sizes for no other dtype
        return f"out_dtype {out_dtype} (supported: torch.bfloat16)"
    if bias is not None:
        return f"a bias {bias.dtype} (supported: None)"
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale.numel() != 1:
            return f"{name} of shape {list(scale.shape)} (supported: one scale)"
    (m, k), n = a.shape, b.shape[1]
    if not m or not n:
        return None
    if not k or k % 16 or n % 16:
        return f"K {k} and N {n} (supported: multiples of 16)"
    if max(m, n, k) >= 2**31:
        return f"M {m}, N {n} and K {k} (supported: up to {2**31 - 1})"
    if a.stride() != (k, 1):
        return limits.strides("a", a, "row-major, contiguous")
    if b.stride() != (1, k):
        return limits.strides("b", b, "column-major, contiguous")
    for name, x in (("a", a), ("b", b)):
        if x.data_ptr() & 15:
            return limits.misaligned(name, x, "16")
    return limits.without_float8(a.dtype, a.get_device())


def scaled_mm_fp8(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    if not out.numel():
        return out
    run, index = _modules.product(), a.get_device()
    # A workspace of its own: launches on two streams mustn't write to one.
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=a.device)
    operands = a[None], b[None], out[None], scale_a, scale_b, workspace
    if index < 0 or index == torch.cuda.current_device():
        run(*operands, torch.cuda.current_blas_handle())
    else:
        with torch.cuda.device(index):  # the handle is one of the current device
            run(*operands, torch.cuda.current_blas_handle())
    return out
