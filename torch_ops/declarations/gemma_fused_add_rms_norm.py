"""gemma_fused_add_rms_norm: add a residual, then gemma_rms_norm of the sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ops import checks
from torch_ops.contracts import NormContract
from torch_ops.declarations._shared import upcast
from torch_ops.declare import op
from torch_ops.inlined import rounded
from torch_ops.training import Run, Saved


@op(contract=NormContract(weight_mul="one_plus_weight_fp32", residual="norm_of_rounded"))
def gemma_fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Add a residual and normalize the sum, scaled by one plus the weight.

    residual_out = x + residual
    out = residual_out / sqrt(mean(residual_out ** 2, -1) + eps) * (1 + weight)

    Args:
        x: ``[..., hidden]`` float16, bfloat16, float32 or float64, any strides.
        residual: Shape, dtype and device of ``x``.
        weight: ``[hidden]`` of any of these dtypes; 1 is added in float32.
        eps: Added to the mean of squares, >= 0.

    Returns:
        ``(out, residual_out)``, both ``[..., hidden]``, dtype of ``x``, contiguous.
        ``residual_out`` is the sum rounded once; ``out`` is the norm of that rounded sum,
        computed in float32 (float64 for float64 input) and rounded once.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, or ``eps`` is negative.
        NoBackwardError: an input requires grad and the backend has no backward, or gradients
            are differentiated once more: they are of first order.

    Source: the Gemma models (arXiv 2403.08295).
    """
    residual_out = rounded(x.contiguous() + residual.contiguous())
    wide = upcast(residual_out)
    out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (1 + upcast(weight, x))
    return out.to(x.dtype), residual_out


gemma_fused_add_rms_norm.batch("x", "residual")


@gemma_fused_add_rms_norm.check
def _check(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    checks.float_dtype("gemma_fused_add_rms_norm", "x", x)
    if x.dim() < 1:
        checks.refuse("gemma_fused_add_rms_norm", "x", "of shape []", "rank >= 1, [..., hidden]")
    checks.shape("gemma_fused_add_rms_norm", "residual", residual, x.shape, "the shape of 'x'")
    checks.like("gemma_fused_add_rms_norm", "residual", residual, x, "x")
    checks.vector("gemma_fused_add_rms_norm", "weight", weight, x)
    checks.non_negative("gemma_fused_add_rms_norm", "eps", eps)


@gemma_fused_add_rms_norm.fake
def _fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@gemma_fused_add_rms_norm.backward("rms_norm_backward", saves=("out1", "weight"))
def _gradients(run: Run, grads: Sequence[Tensor], saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    grad, residual_grad = grads
    total, weight = saved["out1"], saved["weight"]
    dx, dweight = run(total, grad, weight, residual_grad, saved["eps"], True)
    return dx, dx, dweight
