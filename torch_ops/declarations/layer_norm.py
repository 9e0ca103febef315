"""layer_norm: normalize rows by mean and variance."""

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
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalize the last axis to mean 0 and variance 1, then scale and shift.

    out = (x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps) * weight + bias

    Args:
        x: ``[..., hidden]`` float16, bfloat16, float32 or float64, any strides.
        weight: ``[hidden]`` of any of these dtypes; None is a weight of ones.
        bias: ``[hidden]`` of any of these dtypes; None is a bias of zeros.
        eps: Added to the variance, >= 0.

    Returns:
        ``[..., hidden]``, dtype of ``x``, contiguous. The variance is that of the centered row
        (two passes); everything is float32 (float64 for float64 input), rounded once.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, or ``eps`` is negative.
        NoBackwardError: an input requires grad and the backend has no backward, or gradients
            are differentiated once more: they are of first order.

    Source: Ba, Kiros and Hinton, Layer Normalization (arXiv 1607.06450).
    """
    wide = upcast(x)
    centered = wide - wide.mean(-1, keepdim=True)
    out = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * upcast(weight, x)
    if bias is not None:
        out = out + upcast(bias, x)
    return out.to(x.dtype)


layer_norm.batch("x")


@layer_norm.check
def _check(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> None:
    checks.float_dtype("layer_norm", "x", x)
    if x.dim() < 1:
        checks.refuse("layer_norm", "x", "of shape []", "rank >= 1, [..., hidden]")
    if weight is not None:
        checks.vector("layer_norm", "weight", weight, x)
    if bias is not None:
        checks.vector("layer_norm", "bias", bias, x)
    checks.non_negative("layer_norm", "eps", eps)


@layer_norm.fake
def _fake(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    return x.new_empty(x.shape)


@layer_norm.backward("layer_norm_backward", saves=("x", "weight", "bias"))
def _gradients(run: Run, grads: Sequence[Tensor], saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    weight, bias = saved["weight"], saved["bias"]
    dx, dweight, dbias = run(saved["x"], grads[0], weight, bias, saved["eps"])
    return dx, dweight, dbias
