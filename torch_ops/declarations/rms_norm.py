"""rms_norm: normalize rows by their root mean square."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ops import checks
from torch_ops.contracts import NormContract
from torch_ops.declarations._shared import upcast
from torch_ops.declare import op
from torch_ops.training import Run, Saved


@op(contract=NormContract(weight_mul="fp32_all"))
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Normalize the last axis by its root mean square.

    out = x / sqrt(mean(x ** 2, -1) + eps) * weight

    Args:
        x: ``[..., hidden]`` float16, bfloat16, float32 or float64, any strides.
        weight: ``[hidden]`` of any of these dtypes; None is a weight of ones.
        eps: Added to the mean of squares, >= 0.

    Returns:
        ``[..., hidden]``, dtype of ``x``, contiguous. Everything is computed in float32 (float64
        for float64 input) and rounded once.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, or ``eps`` is negative.
        NoBackwardError: an input requires grad and the backend has no backward, or gradients
            are differentiated once more: they are of first order.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv 1910.07467).
    """
    wide = upcast(x)
    out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * upcast(weight, x)
    return out.to(x.dtype)


rms_norm.batch("x")


@rms_norm.check
def _check(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> None:
    checks.float_dtype("rms_norm", "x", x)
    if x.dim() < 1:
        checks.refuse("rms_norm", "x", "of shape []", "rank >= 1, [..., hidden]")
    if weight is not None:
        checks.vector("rms_norm", "weight", weight, x)
    checks.non_negative("rms_norm", "eps", eps)


@rms_norm.fake
def _fake(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return x.new_empty(x.shape)


@rms_norm.backward("rms_norm_backward", saves=("x", "weight"))
def _gradients(run: Run, grads: Sequence[Tensor], saved: Saved) -> tuple[Tensor, Tensor]:
    dx, dweight = run(saved["x"], grads[0], saved["weight"], None, saved["eps"], False)
    return dx, dweight
