"""gemma_rms_norm: rms_norm whose weight is stored as its difference from one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ops import checks
from torch_ops.contracts import NormContract
from torch_ops.declarations._shared import upcast
from torch_ops.declare import op
from torch_ops.training import Run, Saved


@op(contract=NormContract(weight_mul="one_plus_weight_fp32"))
def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalize the last axis by its root mean square and scale by one plus the weight.

    out = x / sqrt(mean(x ** 2, -1) + eps) * (1 + weight)

    Args:
        x: ``[..., hidden]`` float16, bfloat16, float32 or float64, any strides.
        weight: ``[hidden]`` of any of these dtypes; 1 is added in float32.
        eps: Added to the mean of squares, >= 0.

    Returns:
        ``[..., hidden]``, dtype of ``x``, contiguous. Everything is computed in float32 (float64
        for float64 input) and rounded once.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, or ``eps`` is negative.
        NoBackwardError: an input requires grad and the backend has no backward, or gradients
            are differentiated once more: they are of first order.

    Source: the Gemma models (arXiv 2403.08295).
    """
    wide = upcast(x)
    out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (out * (1 + upcast(weight, x))).to(x.dtype)


gemma_rms_norm.batch("x")


@gemma_rms_norm.check
def _check(x: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    checks.float_dtype("gemma_rms_norm", "x", x)
    if x.dim() < 1:
        checks.refuse("gemma_rms_norm", "x", "of shape []", "rank >= 1, [..., hidden]")
    checks.vector("gemma_rms_norm", "weight", weight, x)
    checks.non_negative("gemma_rms_norm", "eps", eps)


@gemma_rms_norm.fake
def _fake(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x.new_empty(x.shape)


@gemma_rms_norm.backward("rms_norm_backward", saves=("x", "weight"))
def _gradients(run: Run, grads: Sequence[Tensor], saved: Saved) -> tuple[Tensor, Tensor]:
    dx, dweight = run(saved["x"], grads[0], saved["weight"], None, saved["eps"], True)
    return dx, dweight
